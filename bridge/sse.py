"""Writes an answer as server-sent events, and never waits on a reader without end.

Frames that show what came from the log carry the id of the place after it (`event_ids`); the opening, an error, the usage, `[DONE]` and
keep-alive comments carry none, so a stream taken up after any id goes on with exactly what follows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bridge.answer_headers import answer_headers
from bridge.calls import Call, Update
from bridge.errors import error_object
from bridge.rendering import Rendering
from bridge.servers import abort
from infra import metrics
from schemas.reasons import Reason

SLOW_GRACE_S = 2.0
"""How long a reader that fell too far behind may take to read the reason; then its connection is cut."""
KEEP_ALIVE = b": keep-alive\n"
"""No blank line follows: after an event with an id the official client would take it for the end of an empty event, and fail."""
DONE = b"data: [DONE]\n\n"

_log = structlog.get_logger(__name__)


def frame(data: dict[str, Any], event_id: str | None = None) -> bytes:
    """One server-sent event."""
    body = b"data: " + orjson.dumps(data) + b"\n\n"
    return body if event_id is None else b"id: " + event_id.encode() + b"\n" + body


class Frames:
    """Turns a call's updates into frames."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._opened = rendering.call.opened

    def of(self, update: Update) -> bytes:
        """All frames of an update, the last ones included when it is done."""
        rendering = self._rendering
        out = [] if self._opened else [frame(chunk) for chunk in rendering.opening()]
        self._opened = True
        chunk = rendering.chunk(update)
        if chunk is not None:
            out.append(frame(chunk, update.event_id))
        if update.error is not None:
            out.append(frame(error_object(update.error)))
        elif update.done:
            if rendering.include_usage:
                out.append(frame(rendering.usage_chunk()))
            out.append(DONE)
        return b"".join(out)


class SseResponse(Response):
    """Streams a call whose verdict is in. `finish` is called with the outcome when the stream is over, however it ends."""

    def __init__(
        self,
        call: Call,
        rendering: Rendering,
        observe: Callable[[Update], None],
        finish: Callable[[], None],
        keepalive_s: float,
        stall_s: float,
    ) -> None:
        """`keepalive_s`: a comment after so long without an event. `stall_s`: a write that takes longer ends the stream."""
        self._call = call
        self._frames = Frames(rendering)
        self._observe = observe
        self._finish = finish
        self._keepalive_s = keepalive_s
        self._stall_s = stall_s
        self._sending: asyncio.Timeout | None = None
        super().__init__(
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **answer_headers(call),
            },
            media_type="text/event-stream",
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI hands it in
        """Serve."""
        self._call.on_slow = self._hurry
        try:
            await self._write(
                send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await self._events(send)
        except TimeoutError:
            self._call.fail_slow()
            abort(scope)
        finally:
            if self._call.error is not None and self._call.error.reason is Reason.SLOW_READER:
                metrics.STREAM_SLOW_READER.labels("sse").inc()
                _log.info("closed a slow reader's stream", request_id=self._call.request_id)
            self._call.on_slow = None
            self._finish()

    async def _events(self, send: Send) -> None:
        done = False
        while not done:
            if await self._call.wait(self._keepalive_s):
                update = self._call.take()
                done = update.done
                body = self._frames.of(update)
                self._observe(update)
            else:
                body = KEEP_ALIVE
            await self._write(send, {"type": "http.response.body", "body": body, "more_body": not done})

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        """Raises TimeoutError if the reader doesn't take it in time."""
        slow = self._call.error is not None and self._call.error.reason is Reason.SLOW_READER
        self._call.sending = True
        try:
            async with asyncio.timeout(min(SLOW_GRACE_S, self._stall_s) if slow else self._stall_s) as self._sending:
                await send(message)
        finally:
            self._sending = None
            self._call.sending = False

    def _hurry(self) -> None:
        """The reader fell behind while a write waits for it: give that write little time to end."""
        if self._sending is not None:
            self._sending.reschedule(asyncio.get_running_loop().time() + SLOW_GRACE_S)
