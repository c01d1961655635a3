"""What a worker does last, in bounded time: it waits for its answers while that makes sense, and takes leave of the log.

With the log away nothing can be finished, released or committed. Then a worker leaves as if it had died, only sooner than it would be
killed: its answers go on elsewhere once its session has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from aiokafka.errors import KafkaError

from schemas.errors import HeadraceError
from workers.control import Control
from workers.group import Group
from workers.report import STOPPED, Reporter
from workers.takeover import TakeOver

log = structlog.get_logger("worker")

LOOK_AGAIN_S = 1.0
HANDOVER_WAIT_S = 3.0
"""So long an answer goes on after its worker has left the group; by then another has taken it over, or there is none."""
LEAVE_WAIT_S = 5.0
AWAY_WAIT_S = 1.0
"""What a log that is away is waited for."""


async def await_jobs(
    jobs: set[asyncio.Task[None]], failed: asyncio.Event, limit_s: float, hopeless: Callable[[], bool] = lambda: False
) -> None:
    """Returns when no job is left (`jobs` shrinks as they end), when something has failed, when it is hopeless, or after `limit_s`."""
    failing = asyncio.ensure_future(failed.wait())
    try:
        async with asyncio.timeout(limit_s):
            while jobs and not failing.done() and not hopeless():
                await asyncio.wait({*jobs, failing}, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        pass
    finally:
        failing.cancel()


async def leave(group: Group, control: Control, takeover: TakeOver, reporter: Reporter, *, away: bool) -> None:
    """Commits, leaves the group so that others need not wait for the session to end, and says goodbye: as far as time allows.

    `away` says that the log can't be reached.
    """
    try:
        async with asyncio.timeout(AWAY_WAIT_S if away else LEAVE_WAIT_S):
            await group.commit()
            await group.stop()
            await control.stop()
            await takeover.stop()
            await reporter.change(STOPPED)
    except (TimeoutError, HeadraceError, KafkaError) as error:
        log.warning("left without goodbye", error=repr(error))
