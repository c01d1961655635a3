"""The port that every engine serves: prompt token ids in, generated token ids out, one answer a call.

An engine chooses tokens and nothing else. Text, stop strings, usage and the end of an answer are the text fold's, which reads the ids;
an engine may go on after the fold has seen the end, until the caller closes the iterator or aborts the key. `max_tokens` is the
engine's to keep. Everything runs in the caller's event loop; an engine keeps its heavy work in threads or processes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from schemas.errors import HeadraceError
from schemas.events import Sampling
from schemas.reasons import Reason


class EngineError(HeadraceError):
    """The engine failed on one request; others go on. What it couldn't begin before the deadline is `deadline_exceeded`."""

    def __init__(self, message: str, reason: Reason = Reason.ENGINE_ERROR) -> None:
        super().__init__(reason, message)


class EngineDead(EngineError):
    """The engine as a whole is gone: the worker must exit, so that it is started again and the log's next owner goes on."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One answer to make.

    Attributes:
        key: names this run of it; unique in the engine.
        prompt_token_ids: the prompt, and after it the tokens to go on from.
        sampling: how to choose tokens; `max_tokens` and `min_tokens` count what is still to come; `n`, `stop` aren't for engines.
        continued: how many of the last prompt tokens are the answer's own first tokens.
        cache_salt: keeps the prefix cache of one tenant apart from others'.
        priority: lower runs first, where an engine knows priorities.
        shared: what names the whole answer that this belongs to, if equal requests that run at once may have one generation (see `shared`); an
            engine itself passes over it.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    continued: int = 0
    cache_salt: str = ""
    priority: int = 0
    shared: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A chosen token's log-probability, and the likeliest tokens there with theirs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineChunk:
    """New tokens of an answer.

    Attributes:
        token_ids: what came since the last chunk; may be empty in the last.
        logprobs: one a token if the request asked for them, else None.
        finished: the engine makes no more: end of sequence, a stop token, or `max_tokens`.
        cached_tokens: prompt tokens that were in the prefix cache; told in the first chunk.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[Scored, ...] | None = None
    finished: bool = False
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine does now. `kv_cache_use` runs from 0 to 1, and is None where there is no such cache."""

    running: int = 0
    waiting: int = 0
    kv_cache_use: float | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to set an engine up: a model version's part of it, with `artifact` resolved to a directory where it is one.

    `engine_args` are the registered version's, decoded; an engine refuses what it doesn't know.
    """

    model: str
    artifact: str
    context_length: int
    slots: int
    engine_args: dict[str, object] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """See the module. `generate` is to be used as `async with aclosing(engine.generate(request)) as chunks`."""

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to `vocab_size - 1`."""

    @property
    def context_length(self) -> int:
        """The longest prompt and answer together, in tokens."""

    async def start(self) -> None:
        """Loads the model; returns when it can generate. Raises EngineDead, or HeadraceError for a configuration it refuses."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """The answer's tokens as they come. Closing the iterator aborts. Raises EngineError or EngineDead."""

    async def abort(self, key: str) -> None:
        """Stops making tokens for `key`; its iterator ends. An unknown key changes nothing."""

    def stats(self) -> EngineStats:
        """What the engine does now."""

    async def shutdown(self) -> None:
        """Frees everything; safe to call twice, and after a start that failed."""
