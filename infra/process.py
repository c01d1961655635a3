"""The frame of every process: one event loop, a stop event set by SIGTERM or SIGINT, and an exit status that is true."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
import uvloop

from infra.telemetry import configure_logging
from schemas.errors import HeadraceError

STOP_GRACE_S = 25.0
"""How long a process may take to stop after the first signal; then it is cancelled, and exits 1."""
CANCEL_GRACE_S = 3.0

GC_THRESHOLDS = (50_000, 20, 50)
"""Records and their futures come and go by thousands a second and hold no cycles: looking for those at Python's own pace costs a tenth
of the time."""

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
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stopped_in_time = runner.run(_supervised(main, log))
    except HeadraceError as error:
        log.error("stopped by an error", reason=error.reason.value, message=error.message)
        raise SystemExit(1) from None
    except Exception:
        log.exception("crashed")
        raise SystemExit(1) from None
    if not stopped_in_time:
        raise SystemExit(1)


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
