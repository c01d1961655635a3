"""`inference.GRPCInferenceService`: the protocol over gRPC, with Triton's `RepositoryIndex` and `ModelStreamInfer`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import structlog

from bridge.auth import Caller
from bridge.body import PARSED_AT_ONCE_BYTES
from bridge.calls import Call
from bridge.door import FrontDoor
from bridge.errors import rates_of, stopping
from bridge.inference import models
from bridge.inference.asking import BYTES_MAX, Ask, Scalar
from bridge.inference.grpc_calls import (
    END_GRACE_S,
    REASON,
    RETRY_AFTER,
    CallersHandler,
    Context,
    Handler,
    abort,
    answering,
    callers_unary,
    headers_of,
    in_seconds,
    next_message,
    parsed,
    trailers,
    unary,
)
from bridge.inference.grpc_requests import read_message, write_message, write_parameters
from bridge.inference.messages import SERVICE, ModelInferRequest, ModelStreamInferResponse, message
from bridge.inference.parameters import read_wishes
from bridge.inference.serving import Serving, begin
from bridge.limits import rate_headers
from bridge.observe import refused
from infra import metrics, ports
from schemas.errors import HeadraceError
from schemas.reasons import Reason

PURPOSE = "gRPC"
REQUEST_ID, REPLAYED = "request_id", "replayed"
"""What is told on a stream beside a request's last part."""
FINAL_RESPONSE = "triton_enable_empty_final_response"
"""Asks that a stream's end be told; it always is, by `triton_final_response` of the last part."""
ENVELOPE_BYTES = 1024 * 1024
"""What an answer's message may have around its tensors."""
IDLE_MAX_S = 600.0
"""A stream on which nothing is asked and nothing is answered for so long is ended."""
LOOK_S = 0.5
"""How often an idle stream looks whether the front door stops."""
_log = structlog.get_logger(__name__)


class GrpcServer:
    """Listens from `start` until `stop`."""

    def __init__(self, door: FrontDoor, not_ready: Callable[[], str | None]) -> None:
        """`not_ready` gives the reason why no calls should come, or None."""
        settings = door.settings
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", settings.body_bytes_max),
                ("grpc.max_send_message_length", BYTES_MAX + ENVELOPE_BYTES),
            ),
            maximum_concurrent_rpcs=settings.open_requests_max,
        )
        self._server.add_generic_rpc_handlers((_handlers(_Service(door, not_ready)),))

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, which is any free one for 0. Raises PortInUse."""
        ports.require_free(port, host, PURPOSE)
        try:
            bound = int(self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
        except RuntimeError as error:
            raise HeadraceError(Reason.CONFLICT, f"can't listen for gRPC on {host}:{port}: {error}") from None
        await self._server.start()
        return bound

    async def stop(self, drain_s: float) -> None:
        """Take no more calls, and let those under way end for at most `drain_s`."""
        await self._server.stop(drain_s)


def _handlers(service: _Service) -> grpc.GenericRpcHandler:
    free: dict[str, Handler] = {"ServerLive": service.server_live, "ServerReady": service.server_ready}
    keyed: dict[str, CallersHandler] = {
        "ServerMetadata": service.server_metadata,
        "ModelReady": service.model_ready,
        "ModelMetadata": service.model_metadata,
        "ModelInfer": service.model_infer,
        "RepositoryIndex": service.repository_index,
    }
    answers = {name: unary(handler, message(f"{name}Request")) for name, handler in free.items()}
    for name, callers in keyed.items():
        answers[name] = callers_unary(callers, message(f"{name}Request"), service.caller)
    # A unary call is a stream of one message to the server, so that nothing of it is read for who has no key.
    found: dict[str, Any] = {
        name: grpc.stream_unary_rpc_method_handler(
            answering(answer), response_serializer=message(f"{name}Response").SerializeToString
        )
        for name, answer in answers.items()
    }
    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        found[name] = grpc.stream_unary_rpc_method_handler(answering(service.not_by_call))
    found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        answering(service.model_stream_infer), response_serializer=ModelStreamInferResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, found)


class _Service:
    """What the service's methods do."""

    def __init__(self, door: FrontDoor, not_ready: Callable[[], str | None]) -> None:
        self._door = door
        self._readiness = models.Readiness(door, not_ready)

    async def caller(self, context: Context) -> Caller:
        """Who calls. Raises HeadraceError: invalid_api_key, permission_denied, unavailable."""
        return await self._door.auth.from_headers(headers_of(context))

    async def not_by_call(self, _requests: Any, context: Context) -> Any:
        """Refused, with nothing of the message read: it may hold a model's files."""
        await self.caller(context)
        raise models.not_by_call()

    async def server_live(self, _request: Any, _context: Context) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def server_ready(self, _request: Any, _context: Context) -> Any:
        return message("ServerReadyResponse")(ready=self._readiness.server)

    async def server_metadata(self, _request: Any, _caller: Caller, _context: Context) -> Any:
        return message("ServerMetadataResponse")(**models.server_metadata())

    async def model_ready(self, request: Any, _caller: Caller, _context: Context) -> Any:
        """An answer and no error for what isn't there, as from Triton: clients ask to know."""
        try:
            found = models.find(self._door.models, request.name, request.version)
        except HeadraceError:
            return message("ModelReadyResponse")(ready=False)
        return message("ModelReadyResponse")(ready=self._readiness.why_not(found) is None)

    async def model_metadata(self, request: Any, _caller: Caller, _context: Context) -> Any:
        found = models.find(self._door.models, request.name, request.version)
        return message("ModelMetadataResponse")(**models.model_metadata(found))

    async def repository_index(self, request: Any, _caller: Caller, _context: Context) -> Any:
        return message("RepositoryIndexResponse")(models=self._readiness.index(ready_only=request.ready))

    async def model_infer(self, request: Any, caller: Caller, context: Context) -> Any:
        ask, serving = await self._begin(caller, request, context)
        try:
            answer = await serving.whole()
            context.set_trailing_metadata(trailers(serving.call))
            return await _written(ask, answer, stream=False)
        except HeadraceError as error:
            await abort(context, error, serving.call)
        finally:
            serving.close()

    async def model_stream_infer(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Several requests at once, each answered in one or more parts; one that fails leaves the others alone."""
        caller = await self.caller(context)
        # Else it goes with the first message, and again with the status where that message is stuck: gRPC refuses it, and the stream never ends.
        await context.send_initial_metadata(())
        stream = _Stream(context, self._door.settings.reader_stall_ms / 1000)
        self._door.serve(caller, stream.end)
        error: HeadraceError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks: set[asyncio.Task[None]] = set()
                try:
                    await self._take(requests, caller, context, stream, group, tasks)
                except HeadraceError as found:
                    error = found
                    if tasks:  # what is under way hears of it by itself
                        await asyncio.wait(tasks, timeout=END_GRACE_S)
                    for task in tasks:
                        task.cancel()
        except asyncio.CancelledError:
            if stream.slow is None:
                raise
            error = stream.slow
        finally:
            self._door.served(caller, stream.end)
        if error is not None:
            raise error

    async def _take(
        self,
        requests: AsyncIterator[bytes],
        caller: Caller,
        context: Context,
        stream: _Stream,
        group: asyncio.TaskGroup,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """Begins each request that comes. Raises HeadraceError when the stream must end: its key is revoked, or nothing is to be done on it."""
        room = asyncio.Semaphore(self._door.settings.socket_requests_max)

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            room.release()

        while True:
            await room.acquire()
            raw = await self._next(requests, stream, tasks)
            if raw is None:
                return
            request = await parsed(ModelInferRequest, raw)
            task = group.create_task(self._serve(caller, request, context, stream), name="stream-infer")
            tasks.add(task)
            task.add_done_callback(ended)

    async def _next(
        self, requests: AsyncIterator[bytes], stream: _Stream, tasks: set[asyncio.Task[None]]
    ) -> bytes | None:
        reading = next_message(requests)
        loop = asyncio.get_running_loop()
        busy_s = loop.time()
        while not reading.done():
            watched: set[asyncio.Future[Any]] = {reading, stream.ended}
            await asyncio.wait(watched, timeout=min(LOOK_S, IDLE_MAX_S), return_when=asyncio.FIRST_COMPLETED)
            if stream.ended.done():
                raise stream.ended.result()
            if tasks:
                busy_s = loop.time()
            elif self._door.draining:
                raise stopping()
            elif loop.time() - busy_s >= IDLE_MAX_S and not reading.done():
                raise HeadraceError(Reason.UNAVAILABLE, f"nothing came on this stream for {IDLE_MAX_S:g} s")
        return reading.result()

    async def _serve(self, caller: Caller, request: Any, context: Context, stream: _Stream) -> None:
        serving: Serving | None = None
        try:
            ask, serving = await self._begin(caller, request, context, parts=True)
            serving.call.on_slow = stream.cut
            async for part in serving.parts():
                last = {**part.parameters, **_named(serving.call)}
                answer = replace(part, parameters=last) if part.final else part
                response = ModelStreamInferResponse(infer_response=await _written(ask, answer, stream=True))
                await stream.write(response, serving)
        except HeadraceError as error:
            if serving is None:
                refused(error.reason.value)
            await stream.fail(request.id, error, None if serving is None else serving.call)
        except TimeoutError:
            if serving is not None:
                serving.call.fail_slow()
            stream.cut()
        except Exception:
            _log.exception("an inference call failed")
            await stream.fail(request.id, HeadraceError(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text))
        finally:
            if serving is not None:
                serving.call.on_slow = None
                serving.close()

    async def _begin(
        self, caller: Caller, request: Any, context: Context, *, parts: bool = False
    ) -> tuple[Ask, Serving]:
        arrived_s = asyncio.get_running_loop().time()
        large = request.ByteSize() > PARSED_AT_ONCE_BYTES
        ask = await asyncio.to_thread(read_message, request) if large else read_message(request)
        headers = headers_of(context)
        given = {name: value for name, value in ask.parameters.items() if name != FINAL_RESPONSE}
        wishes = read_wishes(caller, given, headers, context.time_remaining())
        keyed = bool(wishes.idempotency_key)
        serving = await begin(
            self._door, caller, ask, wishes, headers, arrived_s, protocol="grpc", outlives=keyed, parts=parts
        )
        return ask, serving


class _Stream:
    """Writes one stream's messages, one after the other, and doesn't wait without end for who doesn't read."""

    def __init__(self, context: Context, stall_s: float) -> None:
        self._context = context
        self._stall_s = stall_s
        self._turn = asyncio.Lock()
        self._serving = asyncio.current_task()
        self.ended: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()
        self.slow: HeadraceError | None = None

    def end(self, error: HeadraceError) -> None:
        """The caller's key is revoked."""
        if not self.ended.done():
            self.ended.set_result(error)

    async def write(self, response: Any, serving: Serving | None = None) -> None:
        """Raises TimeoutError."""
        if serving is not None:
            serving.call.sending = True
        try:
            async with self._turn, asyncio.timeout(self._stall_s):
                await self._context.write(response)
        finally:
            if serving is not None:
                serving.call.sending = False

    async def fail(self, name: str, error: HeadraceError, call: Call | None = None) -> None:
        """One request fails. `call` if it had begun."""
        response = ModelStreamInferResponse(error_message=error.message)
        response.infer_response.id = name
        beside = {**(_named(call) if call else {}), **rate_headers(rates_of(error))}
        told: dict[str, Scalar] = {REASON: error.reason.value, **beside}
        if error.retry_after_ms is not None:
            told[RETRY_AFTER] = in_seconds(error.retry_after_ms)
        write_parameters(response.infer_response, told)
        try:
            await self.write(response)
        except TimeoutError:
            self.cut()

    def cut(self) -> None:
        """The reader is too slow: the stream ends, and says why to one that comes back."""
        if self.slow is not None:
            return
        self.slow = HeadraceError(Reason.SLOW_READER, Reason.SLOW_READER.text)
        metrics.STREAM_SLOW_READER.labels("grpc").inc()
        if self._serving is not None:
            self._serving.cancel()


async def _written(ask: Ask, answer: Any, *, stream: bool) -> Any:
    large = sum(len(tensor.data) for tensor in answer.outputs) > PARSED_AT_ONCE_BYTES
    if large:
        return await asyncio.to_thread(write_message, ask, answer, stream=stream)
    return write_message(ask, answer, stream=stream)


def _named(call: Call) -> dict[str, Scalar]:
    """What the parameters of a request's last message on a stream tell, which has no metadata of its own."""
    return {REQUEST_ID: call.request_id, **({REPLAYED: True} if call.replayed else {}), **rate_headers(call.rates)}
