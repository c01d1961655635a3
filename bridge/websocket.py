"""`/v1/stream`: several calls on one socket, each under the caller's own id.

The caller sends JSON objects:
- `{"type": "auth", "api_key": …}`: first, and only if the upgrade carried no `Authorization` header (browsers can't send one);
- `{"type": "request", "id": …, "endpoint": "chat.completions" | "completions", "body": {…}}`: always answered as a stream;
- `{"type": "resume", "id": …, "request_id": …, "last_event_id": …}`: the rest of a stream after an event, or without one all of it, then
  perhaps with `format` and `include_usage`;
- `{"type": "cancel", "id": …}`.

A request, or a resume, may say what becomes of it if the socket closes: `"on_disconnect": "cancel" | "continue"`. A request may have an
`idempotency_key`, by which it is known when it is asked again; then it goes on unless it says otherwise. It may say what it wants of the response
cache, in the words of HTTP's header: `"cache_control": "no-cache"`.

It gets `{"type": "ready"}` once it is known; then, for each request, `started` (with `request_id`), `chunk` (`data` is OpenAI's chunk;
`event_id` is that of a server-sent event) and either `done` or `error`, which is the request's last. An error with `id` null is about a
message that could not be taken, and ends nothing. What HTTP tells in headers stands in `started` and `error`: `rate_limits` where a limit
holds, `retry_after_ms` where a wait is known to help, `replayed` (true) where the request was asked before, and `cache` (`outcome`, `age_ms`)
where the response cache plays a part.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect

from bridge.auth import Caller
from bridge.body import parse_object
from bridge.cached import CONTROL_FIELD, cache_object, with_control
from bridge.calls import Call, Update
from bridge.door import FrontDoor
from bridge.errors import error_object, error_response, rates_of
from bridge.idempotency import KEY_FIELD, read_key
from bridge.limits import rate_object
from bridge.observe import Observer, refused
from bridge.openai_chat import ChatCall
from bridge.openai_completions import CompletionCall
from bridge.rendering import Rendering
from bridge.servers import abort
from bridge.sse import SLOW_GRACE_S
from bridge.wishes import CANCEL, CONTINUE, WISH_FIELDS, on_disconnect, wish
from infra import metrics
from schemas.errors import HeadraceError
from schemas.reasons import Reason

ID_CHARS_MAX = 128
AUTH_WAIT_S = 10.0
POLICY_VIOLATION = 1008
TRY_AGAIN_LATER = 1013
ON_DISCONNECT = "on_disconnect"

ENDPOINTS: dict[str, type[ChatCall | CompletionCall]] = {"chat.completions": ChatCall, "completions": CompletionCall}
_FIELDS = {
    "request": {"type", "id", "endpoint", "body", KEY_FIELD, CONTROL_FIELD, ON_DISCONNECT},
    "resume": {"type", "id", "request_id", "last_event_id", "format", "include_usage", ON_DISCONNECT},
    "cancel": {"type", "id"},
}

_log = structlog.get_logger(__name__)


class SocketClosed(HeadraceError):
    """The socket can't be written any more. Never leaves this module."""

    def __init__(self) -> None:
        super().__init__(Reason.CANCELLED, Reason.CANCELLED.text)


@dataclass(slots=True, eq=False)
class _Request:
    """What is under way under one of the caller's ids. `call` is None until it is in the log; a cancel may come before."""

    id: str
    call: Call | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.call is not None:
            self.call.outlives = False
            self.call.fail(HeadraceError(Reason.CANCELLED, Reason.CANCELLED.text))


class Socket:
    """One caller's socket: a task reads it, and one task a request writes to it, one at a time."""

    def __init__(self, door: FrontDoor, websocket: WebSocket) -> None:
        self._door = door
        self._socket = websocket
        self._requests: dict[str, _Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._sending: asyncio.Timeout | None = None
        self._slow = False
        self._closed = False

    async def serve(self) -> None:
        """Serve the socket until either side closes it; what is under way then is cancelled."""
        try:
            caller = await self._authenticate()
            if caller is not None:
                self._door.serve(caller, self._revoked)
                try:
                    await self._send({"type": "ready"})
                    await self._read(caller)
                finally:
                    self._door.served(caller, self._revoked)
        except (WebSocketDisconnect, SocketClosed):
            pass
        finally:
            self._closed = True
            tasks = [*self._tasks, *([self._refusing] if self._refusing is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _authenticate(self) -> Caller | None:
        """The caller, by the upgrade's header or by its first message; None after a refusal."""
        if "authorization" in self._socket.headers:
            try:
                caller = await self._door.auth.from_headers(self._socket.headers)
            except HeadraceError as error:
                await self._socket.send_denial_response(error_response(error))
                return None
            await self._socket.accept()
            return caller
        await self._socket.accept()
        try:
            async with asyncio.timeout(AUTH_WAIT_S):
                message = parse_object(await self._receive())
            if message.get("type") != "auth" or not isinstance(message.get("api_key"), str):
                raise HeadraceError(Reason.INVALID_API_KEY, 'the first message must be {"type": "auth", "api_key": …}')
            return await self._door.auth.from_key(message["api_key"])
        except TimeoutError:
            refusal = HeadraceError(Reason.INVALID_API_KEY, f"no key came within {AUTH_WAIT_S:g} s")
        except HeadraceError as error:
            refusal = error
        await self._send({"type": "error", "id": None, **error_object(refusal)})
        await self._close(POLICY_VIOLATION, refusal.reason.value)
        return None

    def _revoked(self, error: HeadraceError) -> None:
        """The caller's key is revoked: what is under way hears of it by itself, then the socket closes."""
        if self._refusing is None:
            self._refusing = asyncio.create_task(self._refuse(error), name="socket-revoked")

    async def _refuse(self, error: HeadraceError) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SLOW_GRACE_S)
        with contextlib.suppress(SocketClosed):
            await self._send({"type": "error", "id": None, **error_object(error)})
            await self._close(POLICY_VIOLATION, error.reason.value)

    # --- from the caller ----------------------------------------------------------------------------------------------

    async def _receive(self) -> bytes | str:
        message = await self._socket.receive()
        if message["type"] != "websocket.receive":
            raise WebSocketDisconnect(message.get("code", 1005))
        text: str | None = message.get("text")
        return text if text is not None else message.get("bytes") or b""

    async def _read(self, caller: Caller) -> None:
        while True:
            raw = await self._receive()
            try:
                self._take(parse_object(raw), caller)
            except HeadraceError as error:
                await self._send({"type": "error", "id": None, **error_object(error)})

    def _take(self, message: dict[str, Any], caller: Caller) -> None:
        """Act on one message. Raises HeadraceError for one that can't be taken."""
        kind, call_id = message.get("type"), message.get("id")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise HeadraceError(Reason.INVALID_REQUEST, f"type must be one of {', '.join(_FIELDS)}", param="type")
        if unknown := sorted(message.keys() - _FIELDS[kind]):
            raise HeadraceError(Reason.UNSUPPORTED_PARAMETER, f"a {kind} has no field {unknown[0]}", param=unknown[0])
        if not isinstance(call_id, str) or not 0 < len(call_id) <= ID_CHARS_MAX:
            raise HeadraceError(
                Reason.INVALID_REQUEST, f"id must be a string of 1 to {ID_CHARS_MAX} characters", param="id"
            )
        if kind == "cancel":
            self._cancel(call_id)
        else:
            self._begin(call_id, message, caller)

    def _cancel(self, call_id: str) -> None:
        request = self._requests.get(call_id)
        if request is None:
            raise HeadraceError(Reason.NOT_FOUND, f"no request with the id {call_id!r} is under way", param="id")
        request.cancel()

    def _begin(self, call_id: str, message: dict[str, Any], caller: Caller) -> None:
        if call_id in self._requests:
            raise HeadraceError(Reason.CONFLICT, f"a request with the id {call_id!r} is under way", param="id")
        if len(self._tasks) >= self._door.settings.socket_requests_max:
            raise HeadraceError(
                Reason.RATE_LIMITED,
                f"a socket carries at most {self._door.settings.socket_requests_max} requests at a time",
                param="id",
            )
        arrived_s = asyncio.get_running_loop().time()
        request = self._requests[call_id] = _Request(call_id)
        task = asyncio.create_task(self._serve_request(request, message, caller, arrived_s), name="socket-request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- one request --------------------------------------------------------------------------------------------------

    async def _serve_request(
        self, request: _Request, message: dict[str, Any], caller: Caller, arrived_s: float
    ) -> None:
        try:
            call, rendering = await self._open(message, caller, arrived_s)
        except Exception as error:
            told = _told(error)
            refused(told.reason.value)
            await self._end(request, _error_message(request.id, told))
            return
        observer = Observer(call, "websocket")
        try:
            request.call = call
            call.on_slow = self._hurry
            if request.cancelled:
                request.cancel()
            await self._forward(request, call, rendering, observer)
        except SocketClosed:
            pass
        except Exception as error:
            await self._end(request, _error_message(request.id, _told(error)))
        finally:
            self._free(request)
            observer.finish()
            self._door.close(call, caller)
        if call.error is not None and call.error.reason is Reason.SLOW_READER:
            await self._close_slow()

    async def _open(
        self, message: dict[str, Any], caller: Caller, arrived_s: float
    ) -> tuple[Call, Callable[[], Rendering]]:
        """The call that a message asks for, and how it is shown once its verdict is in."""
        leaving = message.get(ON_DISCONNECT)
        if message["type"] == "resume":
            cancel = on_disconnect(CONTINUE if leaving is None else leaving, ON_DISCONNECT) == CANCEL
            stream = message.get("request_id")
            if not isinstance(stream, str):
                raise HeadraceError(Reason.INVALID_REQUEST, "request_id must be a string", param="request_id")
            given = {name: value for name, value in message.items() if name in WISH_FIELDS}
            resumed = await self._door.resume(caller, wish(stream, given, cancel), arrived_s)
            return resumed.call, resumed.rendering
        parsed = _parse(message)
        key = read_key(message.get(KEY_FIELD), KEY_FIELD)
        call = await self._door.open(
            caller,
            with_control(parsed.requests, message.get(CONTROL_FIELD), CONTROL_FIELD),
            self._socket.headers,
            arrived_s,
            streamed=parsed.shape,
            outlives=on_disconnect(leaving, ON_DISCONNECT, CONTINUE if key else CANCEL) == CONTINUE,
            idempotency_key=key,
        )
        return call, lambda: parsed.rendering(call)

    async def _forward(
        self, request: _Request, call: Call, render: Callable[[], Rendering], observer: Observer
    ) -> None:
        await call.verdict()
        rendering = render()
        told = rate_object(call.rates) | cache_object(call.legs)
        started = {"type": "started", "id": request.id, "request_id": call.request_id, **told}
        if call.replayed:
            started["replayed"] = True
        await self._send(started, call)
        for chunk in () if call.opened else rendering.opening():
            await self._send({"type": "chunk", "id": request.id, "data": chunk}, call)
        done = False
        while not done:
            await call.wait()
            update = call.take()
            done = update.done
            await self._send_update(request, call, rendering, update)
            observer.sent(update)

    async def _send_update(self, request: _Request, call: Call, rendering: Rendering, update: Update) -> None:
        chunk = rendering.chunk(update)
        if chunk is not None:
            place = {} if update.event_id is None else {"event_id": update.event_id}
            await self._send({"type": "chunk", "id": request.id, **place, "data": chunk}, call)
        if update.error is not None:
            await self._end(request, _error_message(request.id, update.error))
        elif update.done:
            if rendering.include_usage:
                await self._send({"type": "chunk", "id": request.id, "data": rendering.usage_chunk()}, call)
            await self._end(request, {"type": "done", "id": request.id})

    async def _end(self, request: _Request, message: dict[str, Any]) -> None:
        """A request's last message; its id is free before the caller reads it."""
        self._free(request)
        with contextlib.suppress(SocketClosed):
            await self._send(message)

    def _free(self, request: _Request) -> None:
        if self._requests.get(request.id) is request:
            del self._requests[request.id]

    # --- to the caller ------------------------------------------------------------------------------------------------

    async def _send(self, message: dict[str, Any], call: Call | None = None) -> None:
        """Write one message. Raises SocketClosed; a reader that takes nothing for too long is disconnected."""
        if call is not None:
            call.sending = True
        try:
            async with self._lock:
                if self._closed:
                    raise SocketClosed
                limit_s = self._door.settings.reader_stall_ms / 1000
                async with asyncio.timeout(min(limit_s, SLOW_GRACE_S) if self._slow else limit_s) as self._sending:
                    await self._socket.send({"type": "websocket.send", "text": orjson.dumps(message).decode()})
        except TimeoutError:
            await self._close_slow(cut=True)
            raise SocketClosed from None
        except (WebSocketDisconnect, RuntimeError, OSError):
            self._closed = True
            raise SocketClosed from None
        finally:
            self._sending = None
            if call is not None:
                call.sending = False

    def _hurry(self) -> None:
        """A request of this socket overflowed: the write that waits for the reader gets little more time."""
        self._slow = True
        if self._sending is not None:
            self._sending.reschedule(asyncio.get_running_loop().time() + SLOW_GRACE_S)

    async def _close_slow(self, cut: bool = False) -> None:
        if self._closed:
            return
        metrics.STREAM_SLOW_READER.labels("websocket").inc()
        _log.info("closed a slow reader's socket", requests=len(self._tasks))
        if cut:
            self._closed = True
            abort(self._socket.scope)
        else:
            await self._close(TRY_AGAIN_LATER, Reason.SLOW_READER.value)

    async def _close(self, code: int, reason: str) -> None:
        """Close the socket; one that doesn't take the closing frame is cut."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(SLOW_GRACE_S):
                await self._socket.close(code, reason)
        except TimeoutError:
            abort(self._socket.scope)
        except (WebSocketDisconnect, RuntimeError, OSError):
            pass


def _error_message(call_id: str, error: HeadraceError) -> dict[str, Any]:
    wait = {} if error.retry_after_ms is None else {"retry_after_ms": error.retry_after_ms}
    return {"type": "error", "id": call_id, **error_object(error), **wait, **rate_object(rates_of(error))}


def _told(error: Exception) -> HeadraceError:
    """What a caller hears of an error: of a bug, that there was one; it must not wait for ever."""
    if isinstance(error, HeadraceError):
        return error
    _log.error("a socket's request crashed", exc_info=error)
    return HeadraceError(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text)


def _parse(message: dict[str, Any]) -> ChatCall | CompletionCall:
    kind = ENDPOINTS.get(str(message.get("endpoint")))
    if kind is None:
        raise HeadraceError(Reason.INVALID_REQUEST, f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    body = message.get("body")
    if not isinstance(body, dict):
        raise HeadraceError(Reason.INVALID_REQUEST, "body must be an object", param="body")
    if body.get("stream") is False:
        raise HeadraceError(
            Reason.UNSUPPORTED_PARAMETER, "stream: a socket's answers are always streams", param="stream"
        )
    return kind({**body, "stream": True} if body.get("stream") is None else body)
