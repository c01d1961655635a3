"""Callers by the dozen: streams and whole answers, from two tenants, each with the end that it saw and how long that took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tests.system.running import TENANTS, RunningStack, script

CALL_S_MAX = 90.0
"""A call that has heard nothing final by then was left hanging."""


@dataclass(frozen=True)
class Heard:
    """What one caller got: the text so far, and an error if there was one. `finished_s` is on the monotonic clock."""

    expected: str
    text: str
    error: Exception | None
    finished_s: float

    @property
    def whole(self) -> bool:
        """Whether it got its answer, complete and exact."""
        return self.error is None and self.text == self.expected


class Load:
    """Calls under way in a loop of their own, so that the test may hurt processes meanwhile."""

    def __init__(self, stack: RunningStack, model: str, *, calls: int, tokens: int, token_ms: int) -> None:
        """Begins at once. Every second call streams; they alternate between the tenants."""
        self._stack = stack
        self._clients = [stack.async_client(tenant).with_options(timeout=CALL_S_MAX) for tenant in TENANTS]
        self.texts: dict[int, str] = {}
        work = self._all(model, calls, tokens, token_ms)
        self._future: Future[list[Heard]] = asyncio.run_coroutine_threadsafe(work, stack.thread.loop)

    def until_flowing(self, calls: int) -> None:
        """Returns once so many streams have had text."""
        self._stack.until(lambda: sum(map(bool, self.texts.values())) >= calls)

    def heard(self) -> Sequence[Heard]:
        """What became of every call; fails if one was left hanging."""
        return self._future.result(CALL_S_MAX + 10)

    async def _all(self, model: str, calls: int, tokens: int, token_ms: int) -> list[Heard]:
        try:
            return await asyncio.gather(*(self._one(number, model, tokens, token_ms) for number in range(calls)))
        finally:
            for client in self._clients:
                await client.close()

    async def _one(self, number: int, model: str, tokens: int, token_ms: int) -> Heard:
        client = self._clients[number % len(self._clients)]
        content = script(tokens=[f"{number}é, "], repeat=tokens, token_ms=token_ms)
        messages: list[Any] = [{"role": "user", "content": content}]
        self.texts[number], error = "", None
        try:
            async with asyncio.timeout(CALL_S_MAX):
                if number // len(self._clients) % 2:
                    whole = await client.chat.completions.create(model=model, messages=messages)
                    self.texts[number] = whole.choices[0].message.content or ""
                else:
                    stream = await client.chat.completions.create(model=model, messages=messages, stream=True)
                    async for chunk in stream:
                        self.texts[number] += "".join(choice.delta.content or "" for choice in chunk.choices)
        except (openai.OpenAIError, httpx.HTTPError) as found:
            error = found
        return Heard(f"{number}é, " * tokens, self.texts[number], error, time.monotonic())
