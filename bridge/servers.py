"""uvicorn, told three things more: signals are not its business, sockets come bound, and a connection can be cut at once."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

ABORT = "headrace.abort"
LEFT = "headrace.left"
KEEP_ALIVE_S = 75
HEAD_BYTES_MAX = 64 * 1024
STALL_S = 30.0
"""How long a reader may take nothing of an answer that is written."""
PIPELINED_MAX = 16
"""Requests that may wait on a connection for the one that runs, while its reader is still seen to leave."""
HIGHEST = sys.maxsize


class Http(HttpToolsProtocol):
    """Puts a way to cut the connection into each request's scope, and one to hear of its end; and bounds a request's head, which uvicorn doesn't."""

    _gone = False
    _in_head = False
    _head_bytes = 0
    _looking: asyncio.TimerHandle | None = None

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        extensions: dict[str, Any] = {ABORT: self.transport.abort, LEFT: self._on_left}
        self.scope["extensions"] = extensions

    def _on_left(self, left: Callable[[], None]) -> Callable[[], None]:
        """See `on_left`."""
        if self._gone:
            self.loop.call_soon(left)
            return lambda: None
        self.flow.resume_reading()  # a large body paused it, and who doesn't read doesn't hear of an end
        self._listeners.append(left)
        return partial(self._forget, left)

    def _forget(self, left: Callable[[], None]) -> None:
        if left in self._listeners:
            self._listeners.remove(left)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A caller is there."""
        super().connection_made(transport)
        self._listeners: list[Callable[[], None]] = []

    def on_headers_complete(self) -> None:
        """Its head has ended."""
        self._in_head = False
        super().on_headers_complete()
        if self._listeners and len(self.pipeline) <= PIPELINED_MAX:
            self.flow.resume_reading()  # uvicorn reads no further than a second request, and so hears of no end

    def data_received(self, data: bytes) -> None:
        """More came. What came of a head that goes on counts."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response(f"The request's head has more than {HEAD_BYTES_MAX} bytes.")

    def on_response_complete(self) -> None:
        """An answer is written, which doesn't mean that its reader has it."""
        super().on_response_complete()
        self._look(HIGHEST)

    def _look(self, before: int) -> None:
        """Cut a reader that takes nothing for `STALL_S`: what it hasn't taken would stay in memory as long as it likes."""
        if self._looking is not None:
            self._looking.cancel()
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        elif left:
            self._looking = self.loop.call_later(STALL_S, self._look, left)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there to be looked after."""
        super().connection_lost(exc)
        self._gone = True
        for left in list(self._listeners):
            left()
        if self._looking is not None:
            self._looking.cancel()


class WebSocket(WebSocketsSansIOProtocol):
    """Puts a way to cut the connection into the socket's scope, and owes a caller that doesn't read no more than one pong."""

    _pong = b""

    def handle_ping(self) -> None:
        """Of pings that come while nothing can be written, the last is answered (RFC 6455, section 5.5.3)."""
        self._pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(self._pong)
            self._pong = b""

    def resume_writing(self) -> None:
        """The caller has read."""
        super().resume_writing()
        if self._pong and not self.transport.is_closing():
            self.transport.write(self._pong)
        self._pong = b""

    async def run_asgi(self) -> None:
        """The socket is open."""
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions[ABORT] = self.transport.abort
        await super().run_asgi()


def abort(scope: Scope) -> None:
    """Cut the connection and drop what its reader hasn't taken; under another server, nothing."""
    cut = scope.get("extensions", {}).get(ABORT)
    if cut is not None:
        cut()


def on_left(scope: Scope, left: Callable[[], None]) -> Callable[[], None] | None:
    """Has `left` called when the request's connection is gone, until what is returned is called; under another server None, and nothing is done.

    A task that waits for ASGI's `http.disconnect` says the same, and costs as much as a part of the way to the log.
    """
    extension = scope.get("extensions", {}).get(LEFT)
    stop: Callable[[], None] | None = None if extension is None else extension(left)
    return stop


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def make_server(app: ASGIApp, message_bytes_max: int, drain_s: float) -> Server:
    """A server for sockets that are bound already. A WebSocket message beyond `message_bytes_max` closes its socket with code 1009."""
    return Server(
        uvicorn.Config(
            app,
            http=Http,
            ws=WebSocket,
            ws_max_size=message_bytes_max,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
    )
