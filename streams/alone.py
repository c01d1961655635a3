"""One at a time of what has the same name: whoever comes later waits, and takes none of the places of those who work."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

WAITING_MAX = 64
"""So many wait for one name."""


class TooManyWait(Exception):
    """More wait for a name than may."""


class Alone:
    """Who holds which name. Nothing is kept of a name that nobody holds or waits for. Whoever waits does so within `aside`."""

    def __init__(self, aside: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._aside = aside
        self._held: dict[str, asyncio.Event] = {}
        self._waiting: Counter[str] = Counter()

    async def free(self, name: str) -> None:
        """Returns when nobody holds a name. Raises `TooManyWait`."""
        while (held := self._held.get(name)) is not None:
            if self._waiting[name] >= WAITING_MAX:
                raise TooManyWait
            self._waiting[name] += 1
            try:
                async with self._aside():
                    await held.wait()
            finally:
                self._waiting[name] -= 1
                if not self._waiting[name]:
                    del self._waiting[name]

    @contextlib.asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Hold a name while the block runs. Raises `TooManyWait`."""
        await self.free(name)
        done = self._held[name] = asyncio.Event()
        try:
            yield
        finally:
            del self._held[name]
            done.set()
