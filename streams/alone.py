"""One at a time of what has the same name: whoever comes later waits, and takes none of the places of those who work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

WAITING_MAX = 64
"""So many wait for one name."""


def id_name(tenant: str, request_id: str) -> str:
    """The name of one request: what is decided of it is decided at one place at a time."""
    return f"id {tenant} {request_id}"


class TooManyWait(Exception):
    """More wait for a name than may."""


class Alone:
    """Who holds which name. Nothing is kept of a name that nobody holds or waits for. Whoever waits does so within `aside`."""

    def __init__(self, aside: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._aside = aside
        self._held: dict[str, asyncio.Event | None] = {}
        """What each who is held waits for, once somebody does."""
        self._waiting: Counter[str] = Counter()

    async def free(self, name: str) -> None:
        """Returns when nobody holds a name. Raises `TooManyWait`."""
        while name in self._held:
            if self._waiting[name] >= WAITING_MAX:
                raise TooManyWait
            self._waiting[name] += 1
            if (held := self._held[name]) is None:
                held = self._held[name] = asyncio.Event()
            try:
                async with self._aside():
                    await held.wait()
            finally:
                self._waiting[name] -= 1
                if not self._waiting[name]:
                    del self._waiting[name]

    def held(self, name: str) -> bool:
        """Whether somebody holds a name now."""
        return name in self._held

    def of(self, name: str) -> AbstractAsyncContextManager[None]:
        """Hold a name while the block runs. Entering raises `TooManyWait`."""
        return _Holding(name, self._held, self.free)


class _Holding(AbstractAsyncContextManager[None]):
    """Every request enters one: a generator would cost more than what it does."""

    __slots__ = ("_free", "_held", "_name")

    def __init__(
        self, name: str, held: dict[str, asyncio.Event | None], free: Callable[[str], Awaitable[None]]
    ) -> None:
        self._name, self._held, self._free = name, held, free

    async def __aenter__(self) -> None:
        if self._name in self._held:
            await self._free(self._name)
        self._held[self._name] = None

    async def __aexit__(self, *_: object) -> None:
        if (awaited := self._held.pop(self._name)) is not None:
            awaited.set()
