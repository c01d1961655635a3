"""What a worker does side by side: if any of it fails, all of it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """The tasks that serve, and the `jobs` that answer requests, each as long as it runs."""

    def __init__(self) -> None:
        """Nothing runs."""
        self._serving: set[asyncio.Task[None]] = set()
        self.jobs: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None

    def serve(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """One more that serves."""
        return self._spawn(work, self._serving)

    def answer(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """One more job."""
        return self._spawn(work, self.jobs)

    def _spawn(self, work: Coroutine[Any, Any, None], kind: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        kind.add(task)
        task.add_done_callback(kind.discard)
        task.add_done_callback(self._note)
        return task

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self.failure is None:
            self.failure = error
            self.failed.set()

    async def until(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set or anything has failed."""
        waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self.failed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def end(self) -> None:
        """End all of it, whatever it does."""
        every = [*self._serving, *self.jobs]
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)
