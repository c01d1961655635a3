"""The routes of the front door.

`/metrics` is served on the operators' port only (`ops_port`); `/livez` and `/readyz` here too, for load balancers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from bridge.answer_headers import answer_headers
from bridge.auth import Caller
from bridge.body import PARSED_AT_ONCE_BYTES, parse_object, parsed_beside, read_body
from bridge.cached import AGE_HEADER, CACHE_HEADER, CONTROL_HEADER, with_control
from bridge.calls import Call
from bridge.compression import compressed
from bridge.door import FrontDoor
from bridge.errors import REQUEST_ID_HEADER, error_response, stopping
from bridge.event_ids import Shape
from bridge.heads import heads
from bridge.idempotency import KEY_HEADER, REPLAYED_HEADER, read_key, replay_headers
from bridge.inference.rest import inference_routes
from bridge.leaving import end_when_left
from bridge.limits import RATE_HEADERS
from bridge.observe import Observer, refused
from bridge.openai_chat import ChatCall
from bridge.openai_classifications import ClassificationCall
from bridge.openai_completions import CompletionCall
from bridge.openai_embeddings import EmbeddingCall
from bridge.openapi import docs_routes
from bridge.rendering import Rendering
from bridge.sse import SseResponse
from bridge.tensor_calls import TensorRendering, body_param
from bridge.websocket import Socket
from bridge.wishes import CANCEL, CONTINUE, on_disconnect, wish
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, ModelVersionRegistered
from schemas.reasons import Reason

TIMEOUT_HEADER = "X-Headrace-Timeout-Ms"
DISCONNECT_HEADER = "X-Headrace-On-Disconnect"
LAST_EVENT_HEADER = "Last-Event-ID"
Ready = Callable[[], str | None]


class ParsedCall(Protocol):
    """A body that was understood: its requests, whether its answer streams, and how the chunks look then."""

    requests: list[InferenceRequested]
    stream: bool

    @property
    def shape(self) -> Shape: ...


P = TypeVar("P", bound=ParsedCall)


def make_app(door: FrontDoor, not_ready: Ready) -> Starlette:
    """The application. `not_ready` gives the reason why no calls should come, or None."""
    endpoints = _Endpoints(door)

    async def livez(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        reason = not_ready()
        return PlainTextResponse("ok\n") if reason is None else PlainTextResponse(f"{reason}\n", status_code=503)

    async def home(_request: Request) -> Response:
        return RedirectResponse("/docs")

    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/embeddings", endpoints.embeddings, methods=["POST"]),
        Route("/v1/classifications", endpoints.classifications, methods=["POST"]),
        *inference_routes(door, not_ready),
        Route("/v1/streams/{stream}", endpoints.stream, methods=["GET", "DELETE"]),
        Route("/v1/models", endpoints.list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", endpoints.get_model, methods=["GET"]),
        WebSocketRoute("/v1/stream", lambda websocket: Socket(door, websocket).serve()),
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/", home, methods=["GET"]),
        *docs_routes(),
    ]
    middleware = []
    if door.settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=door.settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                REQUEST_ID_HEADER,
                REPLAYED_HEADER,
                CACHE_HEADER,
                AGE_HEADER,
                "Retry-After",
                *RATE_HEADERS,
            ],
        )
        middleware.append(cors)
    handlers: dict[Any, Any] = {HeadraceError: _on_error, HTTPException: _on_http_exception, Exception: _on_crash}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def _on_error(_request: Request, error: HeadraceError) -> Response:
    refused(error.reason.value)
    return error_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405:
        found = HeadraceError(Reason.METHOD_NOT_ALLOWED, f"{request.url.path} doesn't take {request.method}")
    else:
        found = HeadraceError(Reason.NOT_FOUND, f"there is nothing at {request.url.path}; /docs lists what there is")
    response = error_response(found)
    response.headers.update(error.headers or {})
    return response


async def _on_crash(_request: Request, _error: Exception) -> Response:
    return error_response(HeadraceError(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text))


class _Endpoints:
    """What `/v1` serves."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._serve(request, ChatCall)

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._serve(request, CompletionCall)

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        return await self._infer(request, EmbeddingCall)

    async def classifications(self, request: Request) -> Response:
        """`POST /v1/classifications`."""
        return await self._infer(request, ClassificationCall)

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        await self._door.auth.from_headers(request.headers)
        return _json({"object": "list", "data": [_model_object(version) for version in self._door.models.all()]})

    async def get_model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        await self._door.auth.from_headers(request.headers)
        name = request.path_params["model"]
        found = self._door.models.resolve(name)
        if found is None:
            raise HeadraceError(Reason.MODEL_NOT_FOUND, f"no model {name!r} is deployed", param="model")
        return _json(_model_object(found))

    async def _serve(self, request: Request, kind: type[ChatCall | CompletionCall]) -> Response:
        """One call, from its body to its answer."""
        parse: Callable[[Mapping[str, Any], int | None], ChatCall | CompletionCall] = kind
        parsed, call, serving = await self._open(request, parse)
        return await (serving.stream if parsed.stream else serving.whole)(lambda: parsed.rendering(call))

    async def _infer(self, request: Request, kind: type[EmbeddingCall | ClassificationCall]) -> Response:
        """One call of a tensor model."""
        parse: Callable[[Mapping[str, Any], int | None], EmbeddingCall | ClassificationCall]
        parse = partial(kind, models=self._door.models)
        parsed, call, serving = await self._open(request, parse)
        serving.param = body_param
        return await serving.whole(lambda: parsed.rendering(call))

    async def _open(
        self, request: Request, parse: Callable[[Mapping[str, Any], int | None], P]
    ) -> tuple[P, Call, _Serving]:
        """A call from its body into the log."""
        door = self._door
        arrived_s = asyncio.get_running_loop().time()
        headers = heads(request)
        caller = await door.auth.from_headers(headers)
        key = read_key(headers.get(KEY_HEADER.lower()), KEY_HEADER)
        leaving = headers.get(DISCONNECT_HEADER.lower())
        outlives = on_disconnect(leaving, DISCONNECT_HEADER, CONTINUE if key else CANCEL) == CONTINUE
        raw = await read_body(request, door.settings.body_bytes_max)
        timeout_ms = _header_timeout_ms(request)
        parsed = await parsed_beside(raw, lambda: parse(parse_object(raw), timeout_ms))
        streamed = parsed.shape if parsed.stream else None
        control = ", ".join(request.headers.getlist(CONTROL_HEADER)) or None
        call = await door.open(
            caller,
            with_control(parsed.requests, control, CONTROL_HEADER),
            headers,
            arrived_s,
            streamed=streamed,
            outlives=outlives,
            idempotency_key=key,
        )
        return parsed, call, _Serving(door, caller, call, "sse" if parsed.stream else "http", request)

    async def stream(self, request: Request) -> Response:
        """`/v1/streams/{request id}`."""
        return await (self.cancel if request.method == "DELETE" else self.resume)(request)

    async def cancel(self, request: Request) -> Response:
        """`DELETE /v1/streams/{request id}`: stops a request, whoever waits for it. What has ended stays as it is."""
        caller = await self._door.auth.from_headers(request.headers)
        asked = wish(request.path_params["stream"], dict(request.query_params), True)
        await self._door.cancel(caller, asked.request_id)
        return _json({"id": asked.request_id, "object": "stream", "status": "cancelling"}, status=202)

    async def resume(self, request: Request) -> Response:
        """`GET /v1/streams/{request id}`: a stream from after the event `Last-Event-ID`, or from its beginning."""
        door = self._door
        arrived_s = asyncio.get_running_loop().time()
        caller = await door.auth.from_headers(request.headers)
        given = dict(request.query_params)
        if LAST_EVENT_HEADER in request.headers:
            given["last_event_id"] = request.headers[LAST_EVENT_HEADER]
        leaving = request.headers.get(DISCONNECT_HEADER, CONTINUE)
        cancel = on_disconnect(leaving, DISCONNECT_HEADER) == CANCEL
        resumed = await door.resume(caller, wish(request.path_params["stream"], given, cancel), arrived_s)
        serving = _Serving(door, caller, resumed.call, "sse", request)
        return await serving.stream(resumed.rendering)


class _Serving:
    """Writes a call's answer. A refusal is a status, streamed or not: headers wait for the verdict. `param` names a field as the caller does."""

    def __init__(self, door: FrontDoor, caller: Caller, call: Call, protocol: str, request: Request) -> None:
        self._door = door
        self._caller = caller
        self._call = call
        self._observer = Observer(call, protocol)
        self._request = request
        self._finished = False
        self.param: Callable[[str | None], str | None] = lambda param: param
        self._stop = end_when_left(request, call)

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._stop()
        self._observer.finish()
        self._door.close(self._call, self._caller)

    async def stream(self, rendering: Callable[[], Rendering]) -> Response:
        """As server-sent events."""
        settings = self._door.settings
        try:
            await self._call.verdict()
            return SseResponse(
                self._call,
                rendering(),
                self._observer.sent,
                self._finish,
                settings.keepalive_ms / 1000,
                settings.reader_stall_ms / 1000,
            )
        except HeadraceError as error:
            self._finish()
            return self._refusal(error)
        except asyncio.CancelledError:
            return self._cut()
        except BaseException:
            self._finish()
            raise

    async def whole(self, rendering: Callable[[], Rendering | TensorRendering]) -> Response:
        """At once, when it is there."""
        try:
            content = await _collect(self._call, rendering())
        except HeadraceError as error:
            return self._refusal(error)
        except asyncio.CancelledError:
            return self._cut()
        finally:
            self._finish()
        call = self._call
        answer = Response(content, headers=answer_headers(call), media_type="application/json")
        return await compressed(self._request, answer)

    def _refusal(self, error: HeadraceError) -> Response:
        error.param = self.param(error.param)
        response = error_response(error, self._call.request_id, self._call.rates)
        response.headers.update(replay_headers(self._call))
        return response

    def _cut(self) -> Response:
        """The server gives up a call that has had no word yet, since it stops."""
        self._call.fail(stopping())
        self._finish()
        return error_response(stopping(), self._call.request_id)


async def _collect(call: Call, rendering: Rendering | TensorRendering) -> bytes:
    """The whole answer's body: made in a thread where it is large, so that others' streams go on."""
    done = False
    while not done:
        await call.wait()
        update = call.take()
        if update.error is not None:
            raise update.error
        rendering.collect(update)
        done = update.done
    outputs_bytes = sum(len(tensor.data) for leg in call.legs for tensor in leg.outputs)
    return await asyncio.to_thread(_body, rendering) if outputs_bytes > PARSED_AT_ONCE_BYTES else _body(rendering)


def _body(rendering: Rendering | TensorRendering) -> bytes:
    return _dumped(rendering.whole())


def _header_timeout_ms(request: Request) -> int | None:
    value = heads(request).get(TIMEOUT_HEADER.lower())
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 12):
        raise HeadraceError(
            Reason.INVALID_REQUEST, f"{TIMEOUT_HEADER} must be a whole number of milliseconds", param=TIMEOUT_HEADER
        )
    return int(value)


def _json(body: dict[str, Any], headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(_dumped(body), status, headers=headers, media_type="application/json")


def _dumped(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _model_object(version: ModelVersionRegistered) -> dict[str, Any]:
    return {"id": version.model, "object": "model", "created": version.created_ms // 1000, "owned_by": "headrace"}
