"""Logs, metrics and health of one process.

Owns the set-up of structlog (the standard library's loggers go the same way) and the small HTTP server behind `ops_port`.
Runs in the process's own event loop, one task for the server and one for the heartbeat. Must not know what it watches:
a process hands in functions that say whether it is ready and alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import structlog
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from infra import metrics, ports
from infra.objections import objection
from infra.redact import redact_event

HEARTBEAT_MS = 500
HEARTBEAT_LATE_MAX_MS = 5_000
"""An event loop that is later than this with its last heartbeat can't serve callers."""

_CHATTY = {
    "aiokafka": logging.WARNING,
    "kafka": logging.WARNING,
    "faust": logging.WARNING,
    "mode": logging.WARNING,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "uvicorn": logging.WARNING,
    "asyncio": logging.WARNING,
}

Reason = Callable[[], str | None]
"""Says why something is not so; None when it is."""


def configure_logging(process: str, json: bool | None = None, level: str = "info") -> None:
    """Sends structlog and the standard library's loggers to standard error, as one form, with secrets masked.

    Args:
        process: the name in every line, such as `bridge`.
        json: one JSON object a line, or text for people; None decides by whether standard error is a terminal.
        level: debug, info, warning or error.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        lambda _logger, _method, event: {"process": process, **event},
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, redact_event, renderer],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
    for name, quiet in _CHATTY.items():
        logging.getLogger(name).setLevel(max(number, quiet))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class OpsServer:
    """Serves /metrics, /livez and /readyz.

    /livez is 200 while the event loop beats in time and `live` has no objection: a loop that hangs doesn't answer at all,
    one that crawls answers 503. /readyz is 200 when neither `ready` nor anybody else (`infra.objections`) has an objection, else 503 with the
    objection as its body.
    """

    def __init__(self, port: int, ready: Reason, live: Reason | None = None, host: str | None = None) -> None:
        """Takes the port (0 serves nothing). `host` defaults to HEADRACE_OPS_HOST, else 127.0.0.1."""
        self.port = port
        self._ready = ready
        self._live = live
        self._host = host or os.environ.get("HEADRACE_OPS_HOST") or "127.0.0.1"
        self._beat_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._server: _Server | None = None

    async def start(self) -> None:
        """Listens. Raises PortInUse, which names the process that holds the port."""
        listener = ports.bind(self.port, self._host, "metrics and health") if self.port else None
        self._beat_s = time.monotonic()
        self._tasks.append(asyncio.create_task(self._heartbeat(), name="heartbeat"))
        if listener is None:
            return
        routes = [
            Route("/metrics", self._get_metrics),
            Route("/livez", self._get_livez),
            Route("/readyz", self._get_readyz),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._tasks.append(asyncio.create_task(self._server.serve(sockets=[listener]), name="ops-server"))

    async def stop(self) -> None:
        """Stops listening; safe to call twice, and after a start that failed."""
        if self._server is not None:
            self._server.should_exit = True
        for task in self._tasks:
            if task.get_name() == "heartbeat":
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.stop()

    def not_live(self) -> str | None:
        """Why the process isn't alive; None if it is."""
        late_s = max(0.0, time.monotonic() - self._beat_s - HEARTBEAT_MS / 1000)
        if late_s * 1000 > HEARTBEAT_LATE_MAX_MS:
            return f"the event loop's heartbeat is {late_s:.1f} s late"
        return _objection(self._live)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_MS / 1000)
            now_s = time.monotonic()
            metrics.LOOP_LAG_SECONDS.set(max(0.0, now_s - self._beat_s - HEARTBEAT_MS / 1000))
            self._beat_s = now_s

    async def _get_metrics(self, _request: Request) -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    async def _get_livez(self, _request: Request) -> Response:
        return _verdict(self.not_live())

    async def _get_readyz(self, _request: Request) -> Response:
        return _verdict(_objection(self._ready) or objection())


def _objection(reason: Reason | None) -> str | None:
    if reason is None:
        return None
    try:
        return reason()
    except Exception as error:
        return f"the check itself failed: {type(error).__name__}"


def _verdict(objection: str | None) -> Response:
    return PlainTextResponse("ok\n") if objection is None else PlainTextResponse(objection + "\n", status_code=503)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `infra.process` owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
