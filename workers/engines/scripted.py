"""An engine that does as the prompt says: for tests and load, with no model. Its tokenizer is `bytes`: one token a UTF-8 byte.

A prompt that is a JSON object directs the answer; any other is echoed. Members, all optional:

    {"tokens": ["DEF", "G"]}  the strings to make, in order; each comes as one chunk, which counts one token a byte
    {"hex": ["f09f", "98"]}   the same, in raw bytes
    {"repeat": 100}           makes them that many times
    {"nonce": true}           makes a random id instead
    {"first_token_ms": 50}    waits before the first chunk
    {"token_ms": 10}          waits before each later chunk
    {"sleep_ms": 30000}       waits before anything, unless the answer is continued
    {"raise": "error"}        fails after the tokens given, at once if none are; "exit" ends the process instead

The same prompt gives the same tokens, and going on from k tokens goes on at token k (a nonce excepted). An answer that must not end
yet (`ignore_eos`, `min_tokens`) begins again. Sampling parameters that choose between tokens change nothing; log-probabilities are
made up. It takes no time of its own: load tests measure what is around it.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from schemas.errors import HeadraceError
from schemas.events import Sampling
from schemas.reasons import Reason
from workers.engines.port import EngineChunk, EngineConfig, EngineError, EngineRequest, EngineStats, Scored

VOCAB_SIZE = 257
EOS = 256
EXIT_STATUS = 3
_KNOWN_ARGS = ("first_token_ms", "token_ms")


@dataclass(frozen=True, slots=True)
class Script:
    """What a prompt asks for. `chunks` are the strings of one round, in bytes."""

    chunks: tuple[bytes, ...]
    repeat: int = 1
    first_token_ms: float = 0
    token_ms: float = 0
    sleep_ms: float = 0
    failure: str | None = None


def read_script(prompt: bytes) -> Script:
    """The script in a prompt. Raises EngineError if it is an object whose members make no sense."""
    if prompt[:1] == b"{":
        try:
            given = json.loads(prompt)
        except ValueError:
            given = None
        if isinstance(given, dict):
            try:
                return _script(given)
            except (TypeError, ValueError, AttributeError) as error:
                raise EngineError(f"the script can't be followed: {error}") from None
    return Script(tuple(bytes((byte,)) for byte in prompt))


def _script(given: dict[str, Any]) -> Script:
    if given.get("nonce"):
        chunks = tuple(bytes((byte,)) for byte in uuid.uuid4().hex.encode())
    elif "hex" in given:
        chunks = tuple(bytes.fromhex(text) for text in given["hex"])
    else:
        chunks = tuple(text.encode() for text in given.get("tokens", ()))
    return Script(
        tuple(filter(None, chunks)),
        repeat=int(given.get("repeat", 1)),
        first_token_ms=float(given.get("first_token_ms", 0)),
        token_ms=float(given.get("token_ms", 0)),
        sleep_ms=float(given.get("sleep_ms", 0)),
        failure=given.get("raise"),
    )


class ScriptedEngine:
    """See the module. `engine_args` may give `first_token_ms` and `token_ms`, which a script's own override."""

    def __init__(self, config: EngineConfig) -> None:
        """Takes the configuration; HeadraceError (invalid_request) for engine arguments it doesn't know."""
        if unknown := sorted(set(config.engine_args) - set(_KNOWN_ARGS)):
            raise HeadraceError(
                Reason.INVALID_REQUEST,
                f"the scripted engine takes {', '.join(_KNOWN_ARGS)}, not {unknown[0]}",
                param=f"engine_args.{unknown[0]}",
            )
        self._config = config
        self._defaults = {name: float(str(value)) for name, value in config.engine_args.items()}
        self._running: dict[str, asyncio.Event] = {}

    @property
    def vocab_size(self) -> int:
        """256 bytes and the end."""
        return VOCAB_SIZE

    @property
    def context_length(self) -> int:
        """As configured."""
        return self._config.context_length

    async def start(self) -> None:
        """There is nothing to load."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """Follows the script in the prompt."""
        if len(request.prompt_token_ids) + 1 > self.context_length:
            raise EngineError(
                f"the prompt has {len(request.prompt_token_ids)} tokens; the context takes {self.context_length}"
            )
        if request.key in self._running:
            raise EngineError(f"{request.key} is running already")
        stop = self._running[request.key] = asyncio.Event()
        try:
            async with aclosing(self._follow(request, stop)) as chunks:
                async for chunk in chunks:
                    if stop.is_set():
                        return
                    yield chunk
        finally:
            self._running.pop(request.key, None)

    async def abort(self, key: str) -> None:
        """Its iterator ends before the next chunk, and wakes if it waits."""
        if (stop := self._running.get(key)) is not None:
            stop.set()

    def stats(self) -> EngineStats:
        """Everything runs at once."""
        return EngineStats(running=len(self._running))

    async def shutdown(self) -> None:
        """Aborts everything."""
        for stop in self._running.values():
            stop.set()

    async def _follow(self, request: EngineRequest, stop: asyncio.Event) -> AsyncGenerator[EngineChunk]:
        continued = request.continued
        ids = request.prompt_token_ids
        script = read_script(bytes(i for i in ids[: len(ids) - continued] if i < EOS))
        left = request.sampling.max_tokens or self.context_length - len(ids)
        if not continued:
            await _wait(script.sleep_ms, stop)
        wait_ms = script.first_token_ms or self._defaults.get("first_token_ms", 0)
        for chunk in _skip(_chunks(script, request.sampling, continued), continued):
            await _wait(wait_ms, stop)
            wait_ms = script.token_ms or self._defaults.get("token_ms", 0)
            tokens = chunk[:left]
            left -= len(tokens)
            finished = left == 0 or (tokens[-1] == EOS and not request.sampling.ignore_eos)
            yield EngineChunk(tokens, _score(tokens, request.sampling.logprobs), finished)
            if finished:
                return


def _chunks(script: Script, sampling: Sampling, continued: int) -> Iterator[tuple[int, ...]]:
    """The answer's chunks from its beginning, without end if it may not end."""
    made, minimum = 0, sampling.min_tokens + continued
    chunks = [tuple(chunk) for chunk in script.chunks]
    while True:
        for _ in range(script.repeat):
            for chunk in chunks:
                made += len(chunk)
                yield chunk
        _fail(script)
        if made >= minimum and not sampling.ignore_eos:
            yield (EOS,)
            return
        if not chunks or script.repeat < 1:
            chunks, script = [(ord(" "),)], Script((b" ",))


def _fail(script: Script) -> None:
    if script.failure == "exit":
        os._exit(EXIT_STATUS)
    if script.failure is not None:
        raise EngineError("the script says so")


def _skip(chunks: Iterator[tuple[int, ...]], count: int) -> Iterator[tuple[int, ...]]:
    for chunk in chunks:
        if count >= len(chunk):
            count -= len(chunk)
            continue
        yield chunk[count:]
        count = 0


def _score(tokens: tuple[int, ...], wanted: int | None) -> tuple[Scored, ...] | None:
    if wanted is None:
        return None
    return tuple(
        Scored(-0.125, tuple(((token + i) % VOCAB_SIZE, -0.125 - i) for i in range(wanted))) for token in tokens
    )


async def _wait(ms: float, stop: asyncio.Event) -> None:
    if ms <= 0:
        await asyncio.sleep(0)
        return
    try:
        await asyncio.wait_for(stop.wait(), ms / 1000)
    except TimeoutError:
        pass
