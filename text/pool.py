"""Tokenises beside the event loop: long inputs in threads (`tokenizers` releases the GIL), short ones at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from schemas.errors import HeadraceError
from schemas.reasons import Reason
from text.chat import ChatMessage, encode_chat
from text.tokenizer import Tokenizer, no_panic

T = TypeVar("T")
INLINE_CHARS = 2_048
MAX_WAITING = 1_024
NO_PANIC = no_panic("the tokenizer fails on this input")


class TokenizePool:
    """Tokenises without holding up the event loop. Results come as they are ready; their order is the caller's concern.

    Args:
        workers: threads.
        max_waiting: inputs that run or wait for a thread; one more is refused with HeadraceError (overloaded).
    """

    def __init__(self, workers: int, *, max_waiting: int = MAX_WAITING) -> None:
        """Threads start as they are needed."""
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._max_waiting = max_waiting
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Inputs that run in a thread or wait for one."""
        return self._waiting

    async def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        """`tokenizer.encode` of `text`."""
        return await self._run(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_all(
        self, tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """`tokenizer.encode` of each text."""

        def each() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self._run(sum(map(len, texts)), each)

    async def encode_chat(
        self, tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, now_ms: int | None = None
    ) -> list[int]:
        """`text.chat.encode_chat` of `messages`."""
        size = sum(len(message.content) for message in messages)
        return await self._run(size, lambda: encode_chat(tokenizer, messages, now_ms=now_ms))

    def close(self) -> None:
        """Drop what waits, and let what runs come to its end unheeded."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, chars: int, tokenise: Callable[[], T]) -> T:
        def work() -> T:
            with NO_PANIC:
                return tokenise()

        if chars <= INLINE_CHARS:
            return work()
        if self._waiting >= self._max_waiting:
            raise HeadraceError(Reason.OVERLOADED, f"{self._waiting} inputs wait to be tokenised")
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)
        self._waiting += 1
        # An input that its caller gave up on still occupies its thread, so it counts until the thread is done with it.
        future.add_done_callback(lambda _: self._done(loop))
        return await asyncio.wrap_future(future)

    def _done(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody counts any more
            loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self._waiting -= 1
