"""A worker's slots: how many answers it makes at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """Counts slots in use. Whoever waits for one is served first, in order of asking; `on_free` is told of any other."""

    def __init__(self, total: int, on_free: Callable[[], None]) -> None:
        """`total` slots, all free."""
        self.total = total
        self.used = 0
        self._on_free = on_free
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        """Slots that `take` may take now; none while anybody waits."""
        return 0 if self._waiters else self.total - self.used

    def take(self) -> None:
        """Takes a free slot."""
        if not self.free:
            raise RuntimeError("no slot is free")
        self.used += 1

    async def acquire(self) -> None:
        """Takes a slot as soon as it is this caller's turn."""
        if self.free:
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
        """Gives a slot back: to the first that waits, else to whoever takes it next."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.used -= 1
        self._on_free()
