"""Counts and times what callers get."""

from __future__ import annotations

import asyncio

from prometheus_client import Histogram

from bridge.calls import Call, Update
from infra import metrics
from schemas.topics import INTERACTIVE

COMPLETED = "completed"


class Observer:
    """Watches one call, from its entry into the log to its end. `protocol` is sse, http or websocket."""

    def __init__(self, call: Call, protocol: str) -> None:
        self._call = call
        self._open = metrics.of(metrics.STREAMS_OPEN, protocol)
        self._last_s: float | None = None
        self._itl: Histogram | None = None
        self._finished = False
        self._open.inc()

    def sent(self, update: Update) -> None:
        """An update of a stream was written to its caller."""
        tokens = update.tokens
        if tokens == 0:
            return
        now_s = asyncio.get_running_loop().time()
        if self._itl is None or self._last_s is None:
            labels = self._labels()
            if not (self._call.resumed or self._call.replayed):
                metrics.TTFT_SECONDS.labels(*labels).observe(now_s - self._call.arrived_s)
            self._itl = metrics.ITL_SECONDS.labels(*labels)
        else:
            self._itl.observe((now_s - self._last_s) / tokens)
        self._last_s = now_s

    def finish(self) -> None:
        """The call is over; only the first time counts."""
        if self._finished:
            return
        self._finished = True
        self._open.dec()
        error = self._call.error
        outcome = (
            COMPLETED if error is None and self._call.done else "cancelled" if error is None else error.reason.value
        )
        if self._call.resumed:
            metrics.RESUMES.labels(outcome).inc()
        else:
            metrics.of(metrics.REQUESTS, *self._labels(), outcome).inc()

    def _labels(self) -> tuple[str, str, str]:
        """Known once generation started: a name that a caller made up is no label."""
        served = self._call.served
        return ("", "", INTERACTIVE) if served is None else (served.model, served.version, served.tier)


def refused(reason: str) -> None:
    """A call ended before it reached the log."""
    metrics.REQUESTS.labels("", "", INTERACTIVE, reason).inc()
