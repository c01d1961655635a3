"""Loads tokenizers beside the event loop, once each, and turns requests' inputs to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import INLINE_MAX_BYTES
from text.pool import TokenizePool
from text.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")
Aside = Callable[[], AbstractAsyncContextManager[None]]
LARGE_CHARS = INLINE_MAX_BYTES
LARGE_WAITING_MAX = 16
"""Inputs larger than that take seconds. Of the threads one is left to all others, and so many large ones wait at most."""

CROWDED_LOOK_S = 0.1


class Tokenizers:
    """One tokenizer a model version. A load that failed is tried again at the next request."""

    def __init__(self, threads: int) -> None:
        self._pool = TokenizePool(threads)
        self._large = asyncio.Semaphore(max(1, threads - 1))
        self._large_waiting = 0
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}

    def close(self) -> None:
        """Drop what waits."""
        self._pool.close()

    async def get(self, version: ModelVersionRegistered) -> Tokenizer:
        """The version's tokenizer. Raises HeadraceError (internal_error) when its files hold none."""
        ref = version.tokenizer or version.artifact
        task = self._loading.get(ref)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loading[ref] = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, ref))
        return task.result() if task.done() else await asyncio.shield(task)

    @property
    def crowded(self) -> bool:
        """Whether one more large input would be refused."""
        return self._large_waiting >= LARGE_WAITING_MAX

    async def tokenise(
        self,
        request: InferenceRequested,
        tokenizer: Tokenizer,
        now_ms: int,
        aside: Aside | None = None,
    ) -> tuple[int, ...]:
        """The prompt's token ids. Raises HeadraceError naming what the tokenizer or the chat template refuses.

        With `aside` a large input waits within it until others are done; without it is refused where too many wait.
        """
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        chars = len(request.prompt or "") + sum([len(message.content) for message in request.messages or ()])
        if chars <= LARGE_CHARS:
            return await self._tokenise(request, tokenizer, now_ms)
        return await self._in_turn(lambda: self._tokenise(request, tokenizer, now_ms), aside)

    async def encode(self, texts: Sequence[str], tokenizer: Tokenizer, aside: Aside | None) -> list[list[int]]:
        """The token ids of each text, with the special tokens that the tokenizer adds. As `tokenise` otherwise."""
        run = partial(self._pool.encode_all, tokenizer, texts, add_special_tokens=True)
        return await (run() if sum(map(len, texts)) <= LARGE_CHARS else self._in_turn(run, aside))

    async def _in_turn(self, run: Callable[[], Coroutine[Any, Any, T]], aside: Aside | None) -> T:
        while aside is not None and self.crowded:
            async with aside():
                await asyncio.sleep(CROWDED_LOOK_S)
        if self.crowded:
            raise HeadraceError(Reason.OVERLOADED, f"{self._large_waiting} large inputs wait to be tokenised")
        self._large_waiting += 1
        try:
            async with self._large:
                return await run()
        finally:
            self._large_waiting -= 1

    async def _tokenise(self, request: InferenceRequested, tokenizer: Tokenizer, now_ms: int) -> tuple[int, ...]:
        if request.prompt is not None:
            return tuple(await self._pool.encode(tokenizer, request.prompt, add_special_tokens=True))
        return tuple(await self._pool.encode_chat(tokenizer, request.messages or (), now_ms=now_ms))
