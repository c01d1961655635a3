"""Records that are being written beside what reads on, for processes that commit only what is confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

WRITES_MAX = 4_096
"""So much on its way at once; then reading waits."""


class Writes:
    """Records on their way. What they are for may be committed once `settled` has returned."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._count = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        """How many are on their way."""
        return self._count

    async def room(self) -> None:
        """Wait while too many writes run."""
        while self._count >= WRITES_MAX:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def begin(self, work: Awaitable[None], count: int = 1) -> None:
        """Let a write run beside the others, which counts for so many. At once, so that what caused it isn't committed before it is known."""
        task = asyncio.ensure_future(self._guard(work))
        self._tasks[task] = count
        self._count += count
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._count -= self._tasks.pop(task)

    async def _guard(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Nothing more may be committed: whoever watches `failed` ends the process."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def settled(self, timeout_s: float | None = None) -> bool:
        """Wait for every write begun so far; whether all are confirmed."""
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        return all(task.done() for task in tasks) and not self.failed.done()
