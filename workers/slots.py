"""A worker's slots: how many answers it makes at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """Counts slots in use. Whoever waits for one is served first, in order of asking; `on_free` is told of any other.

    The last `guests` of them are taken by `take` alone: nobody waits for one of these.
    """

    def __init__(self, total: int, on_free: Callable[[], None], guests: int = 0) -> None:
        """`total` slots, all free."""
        self.total = total
        self._own = total - guests
        self._passed = 0
        self.used = 0
        self._on_free = on_free
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        """Slots that `take` may take now: while anybody waits, none but the guests'."""
        return self.total - max(self.used, self._own if self._waiters else 0)

    def take(self) -> None:
        """Takes a free slot."""
        if not self.free:
            raise RuntimeError("no slot is free")
        self.used += 1

    async def acquire(self) -> None:
        """Takes a slot as soon as it is this caller's turn."""
        if not self._waiters and self.used < self._own:
            self.used += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def give(self) -> None:
        """Gives a slot back: to the first that waits, else to whoever takes it next.

        Of those beyond the own slots, so many go past who waits as there are guests' slots, and then one doesn't.
        """
        while self._waiters and (self.used <= self._own or self._passed >= self.total - self._own):
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._passed = 0
                waiter.set_result(None)
                return
        self._passed = self._passed + 1 if self._waiters else 0
        self.used -= 1
        self._on_free()
