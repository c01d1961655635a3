"""The frame of every process: one event loop, a stop event set by SIGTERM or SIGINT, and an exit status that is true."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
import uvloop

from infra.telemetry import configure_logging
from schemas.errors import HeadraceError

STOP_GRACE_S = 25.0
"""How long a process may take to stop after the first signal; then it is cancelled, and exits 1."""
CANCEL_GRACE_S = 3.0
LEAVE_GRACE_S = 5.0
"""How long tasks and threads that are left over may take to end with the event loop; then the process ends without them."""

GC_THRESHOLDS = (2_000, 5_000, 10)
"""Records and their futures come and go by thousands a second and hold no cycles: looking for those at Python's own pace costs a tenth
of the time. What is looked through at once is so little that nobody waits for it."""

SWITCH_S = 0.001
"""So long a thread that computes keeps the interpreter from the event loop at most, each time that the loop has let go of it."""

Main = Callable[[asyncio.Event], Awaitable[None]]


def run(main: Main, process: str, level: str | None = None) -> None:
    """Runs `main(stop)` to its end. Returns after an orderly stop; exits 1 after a crash or a stop that took too long.

    `main` must return soon after `stop` is set. A second signal cancels it at once. An error of Headrace's own is logged
    as one line, any other with its traceback. `level` defaults to HEADRACE_LOG_LEVEL, else info.
    """
    configure_logging(process, level=level or os.environ.get("HEADRACE_LOG_LEVEL") or "info")
    log = structlog.get_logger(process)
    gc.freeze()  # what was imported stays
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
    leaving = threading.Timer(LEAVE_GRACE_S, _leave, (log,))
    leaving.daemon = True
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = _status(runner, main, log)
        leaving.start()
    leaving.cancel()
    if status:
        raise SystemExit(status)


def _status(runner: asyncio.Runner, main: Main, log: Any) -> int:
    """Runs `main`, says how it ended, and returns the exit status."""
    try:
        return 0 if runner.run(_supervised(main, log)) else 1
    except HeadraceError as error:
        log.error("stopped by an error", reason=error.reason.value, message=error.message)
    except Exception:
        log.exception("crashed")
    return 1


def _leave(log: Any) -> None:
    log.error("tasks or threads are left over that don't end; leaving them", grace_s=LEAVE_GRACE_S)
    os._exit(1)


async def _supervised(main: Main, log: Any) -> bool:
    """Whether `main` ended by itself. Raises what it raises."""
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal(name: str) -> None:
        if stop.is_set():
            hurry.set()
        else:
            log.info("stopping", signal=name)
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    task = asyncio.ensure_future(main(stop))
    stopping = asyncio.ensure_future(stop.wait())
    hurrying = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task, hurrying}, timeout=STOP_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log.warning("did not stop in time", grace_s=STOP_GRACE_S, hurried=hurry.is_set())
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            if not task.done():
                log.error("does not stop when cancelled; leaving it")
                os._exit(1)
            return False
        task.result()
        return True
    finally:
        stopping.cancel()
        hurrying.cancel()
