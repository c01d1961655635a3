"""Two processes that do the same work, of which one is killed, or told to stop, in the middle of it, and then started again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Self

from infra.supervisor import RESTART_FIRST_S, ChildFailed, ChildSpec, ChildState, ChildStatus, Supervisor

CRASH, DRAIN = "crash", "drain"
READY_WAIT_S = 60.0
END_WAIT_S = 30.0
LOOK_S = 0.05


class Pair:
    """See the module. Use as an async context manager: both are ready inside. The supervisor stops them.

    What comes back is new to the supervisor, so that its wait before a restart doesn't grow from blow to blow.
    """

    def __init__(self, supervisor: Supervisor, spec: Callable[[int, int], ChildSpec]) -> None:
        """`spec(number, life)` says what to run as number 0 or 1 for the time `life`: one name a number, and `restart=False`."""
        self._supervisor = supervisor
        self._spec = spec
        self._lives = [0, 0]
        self._returning: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        specs = [self._spec(number, life) for number, life in enumerate(self._lives)]
        for spec in specs:
            await self._supervisor.start(spec)
        for spec in specs:
            await self._supervisor.ready(spec.name, READY_WAIT_S)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait({self._returning})

    def strike(self, number: int, blow: str) -> int:
        """Kills one (`CRASH`) or tells it to stop (`DRAIN`); returns which of its lives that ends.

        It is started again as soon after its end as `headrace up` would. Raises ChildFailed if it doesn't run.
        """
        status = self._status(number)
        if status.pid is None:
            raise ChildFailed(f"{status.name} doesn't run; its log is {status.log}")
        if blow == CRASH:
            os.killpg(status.pid, signal.SIGKILL)
        else:
            os.kill(status.pid, signal.SIGTERM)
        life = self._lives[number]
        self._returning = asyncio.create_task(self._return(number))
        return life

    async def whole(self) -> None:
        """Returns when both are ready again. Raises ChildFailed if one doesn't come back."""
        if self._returning is not None:
            await self._returning

    async def _return(self, number: int) -> None:
        give_up_at = time.monotonic() + END_WAIT_S
        while (status := self._status(number)).state is not ChildState.STOPPED:
            if time.monotonic() > give_up_at:
                raise ChildFailed(f"{status.name} doesn't end; its log is {status.log}")
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(RESTART_FIRST_S)
        self._lives[number] += 1
        spec = self._spec(number, self._lives[number])
        await self._supervisor.start(spec)
        await self._supervisor.ready(spec.name, READY_WAIT_S)

    def _status(self, number: int) -> ChildStatus:
        name = self._spec(number, self._lives[number]).name
        return next(status for status in self._supervisor.status() if status.name == name)
