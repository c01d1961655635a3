"""Equal requests that run at once have one generation: an engine around another, for those that may share.

Each reader has all of it: from its beginning, then as it goes on, at its own pace; none waits for another. What fails, fails for all. A
generation ends early only when its last reader has left. A finished one is kept a moment, until the response cache has the answer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from decisions.cache import KEPT_MS
from infra import metrics
from workers.engines.port import Engine, EngineChunk, EngineError, EngineRequest, EngineStats

KEPT_MAX = 256
"""Finished generations that are kept;"""
KEPT_TOKENS_MAX = 262_144
"""and the tokens of all of them."""

Identity = tuple[str, str, tuple[int, ...], str, int]


@dataclass(eq=False)
class _Generation:
    """One run of the engine. `news` is set, and replaced, when there is more; `over` once nothing more comes."""

    identity: Identity
    chunks: list[EngineChunk] = field(default_factory=list)
    tokens: int = 0
    over: bool = False
    error: Exception | None = None
    readers: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def tell(self) -> None:
        """Wake every reader."""
        news, self.news = self.news, asyncio.Event()
        news.set()


class SharedEngine:
    """See the module. Implements `port.Engine` by the engine that it is given."""

    def __init__(self, engine: Engine) -> None:
        """Nothing is shared but what says that it may be: `EngineRequest.shared`."""
        self._engine = engine
        self._running: dict[Identity, _Generation] = {}
        self._kept: OrderedDict[Identity, _Generation] = OrderedDict()
        self._kept_tokens = 0
        self._readers: dict[str, _Generation] = {}
        self._aborted: set[str] = set()
        self._numbers = itertools.count(1)

    @property
    def vocab_size(self) -> int:
        """The engine's."""
        return self._engine.vocab_size

    @property
    def context_length(self) -> int:
        """The engine's."""
        return self._engine.context_length

    async def start(self) -> None:
        """Starts the engine."""
        await self._engine.start()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """The answer's tokens, by a generation of its own or one that it shares."""
        if not request.shared:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        if request.key in self._readers:
            raise EngineError(f"{request.key} is running already")
        generation = self._readers[request.key] = self._join(request)
        try:
            read = 0
            while request.key not in self._aborted:
                if read < len(generation.chunks):
                    read += 1
                    yield generation.chunks[read - 1]
                elif generation.error is not None:
                    raise _anew(generation.error)
                elif generation.over:
                    return
                else:
                    await generation.news.wait()
        finally:
            del self._readers[request.key]
            self._aborted.discard(request.key)
            self._leave(generation)

    async def abort(self, key: str) -> None:
        """Ends one reader's iterator; the generation goes on for the others."""
        if (generation := self._readers.get(key)) is not None:
            self._aborted.add(key)
            generation.tell()
        else:
            await self._engine.abort(key)

    def stats(self) -> EngineStats:
        """The engine's: a generation counts once, however many read it."""
        return self._engine.stats()

    async def shutdown(self) -> None:
        """Ends every generation, and the engine."""
        tasks = [generation.task for generation in self._running.values() if generation.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._kept.clear()
        await self._engine.shutdown()

    # --- generations ---------------------------------------------------------------------------------------------------

    def _join(self, request: EngineRequest) -> _Generation:
        identity = _identity(request)
        generation = self._running.get(identity) or self._kept.get(identity)
        if generation is None:
            generation = self._running[identity] = _Generation(identity)
            own = replace(request, key=f"shared.{next(self._numbers)}")
            generation.task = asyncio.create_task(self._run(generation, own), name="shared generation")
        else:
            metrics.SHARED_GENERATIONS.inc()
        generation.readers += 1
        return generation

    def _leave(self, generation: _Generation) -> None:
        generation.readers -= 1
        if generation.readers == 0 and not generation.over:
            self._end(generation)
            if generation.task is not None:
                generation.task.cancel()

    async def _run(self, generation: _Generation, request: EngineRequest) -> None:
        """Reads the engine to the end, whatever pace the readers have."""
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    generation.chunks.append(chunk)
                    generation.tokens += len(chunk.token_ids)
                    generation.tell()
            self._end(generation)
            if generation.chunks and generation.chunks[-1].finished:
                self._keep(generation)
        except Exception as error:  # each reader is told, and does what it would have done by itself
            generation.error = error
        finally:
            self._end(generation)

    def _end(self, generation: _Generation) -> None:
        """Nobody joins it any more, and nothing more comes."""
        generation.over = True
        if self._running.get(generation.identity) is generation:
            del self._running[generation.identity]
        generation.tell()

    def _keep(self, generation: _Generation) -> None:
        self._kept[generation.identity] = generation
        self._kept_tokens += generation.tokens
        asyncio.get_running_loop().call_later(KEPT_MS / 1000, self._forget, generation)
        while len(self._kept) > KEPT_MAX or self._kept_tokens > KEPT_TOKENS_MAX:
            self._forget(next(iter(self._kept.values())))

    def _forget(self, generation: _Generation) -> None:
        if self._kept.get(generation.identity) is generation:
            del self._kept[generation.identity]
            self._kept_tokens -= generation.tokens


def _identity(request: EngineRequest) -> Identity:
    """What makes two requests equal: all but their key and their turn."""
    return request.shared, request.cache_salt, request.prompt_token_ids, repr(request.sampling), request.continued


def _anew(error: Exception) -> Exception:
    """A failure for one more reader: what is raised twice would carry both their traces."""
    return type(error)(error.message) if isinstance(error, EngineError) else error
