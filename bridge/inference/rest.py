"""`/v2`: the protocol over REST, and Triton's extensions of it: the repository's index, and text generation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from bridge.answer_headers import answer_headers
from bridge.body import PARSED_AT_ONCE_BYTES, parsed_beside, read_body
from bridge.calls import Call
from bridge.compression import compressed
from bridge.door import FrontDoor
from bridge.heads import heads
from bridge.idempotency import replay_headers
from bridge.inference import models
from bridge.inference.asking import Answer, Ask
from bridge.inference.elements import invalid
from bridge.inference.parameters import read_wishes
from bridge.inference.rest_answers import error_answer, rendered
from bridge.inference.rest_requests import LENGTH_HEADER, read_ask, read_json
from bridge.inference.serving import Serving, begin
from bridge.inference.texts import GenerateResponse, read_generate
from bridge.leaving import end_when_left
from bridge.observe import refused
from bridge.wishes import CANCEL, CONTINUE, on_disconnect
from schemas.errors import HeadraceError
from schemas.reasons import Reason

DISCONNECT_HEADER = "X-Headrace-On-Disconnect"
Handler = Callable[[Request], Awaitable[Response]]
Read = Callable[[bytes, Request], Ask]
Render = Callable[[Ask, Answer], tuple[bytes, dict[str, str]]]

_log = structlog.get_logger(__name__)


def inference_routes(door: FrontDoor, not_ready: Callable[[], str | None]) -> list[BaseRoute]:
    """The routes of `/v2`. `not_ready` gives the reason why no calls should come, or None."""
    rest = _Rest(door, not_ready)
    paths = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    routes: list[BaseRoute] = [
        *(_route(f"{path}/infer", "POST", rest.infer) for path in paths),  # first: most calls are for these
        _route("/v2/health/live", "GET", rest.live),
        _route("/v2/health/ready", "GET", rest.ready),
        _route("/v2", "GET", rest.server),
        _route("/v2/", "GET", rest.server),
        _route("/v2/repository/index", "POST", rest.index),
        _route("/v2/repository/models/{model}/load", "", rest.not_by_call),
        _route("/v2/repository/models/{model}/unload", "", rest.not_by_call),
    ]
    for path in paths:
        routes += [
            _route(path, "GET", rest.model),
            _route(f"{path}/ready", "GET", rest.model_ready),
            _route(f"{path}/generate", "POST", rest.generate),
            _route(f"{path}/generate_stream", "POST", rest.generate_stream),
        ]
    return [*routes, _route("/v2/{rest:path}", "", rest.nothing)]


def _route(path: str, method: str, handler: Handler) -> Route:
    return Route(path, _Endpoint(method, handler))


class _Endpoint:
    """Answers one method of a path; whatever is raised becomes the protocol's error object."""

    def __init__(self, method: str, handler: Handler) -> None:
        self._method = method
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        request = Request(scope, receive, send)
        try:
            if self._method and request.method not in (self._method, "HEAD" if self._method == "GET" else ""):
                text = f"{request.url.path} doesn't take {request.method}, but {self._method}"
                response = error_answer(HeadraceError(Reason.METHOD_NOT_ALLOWED, text))
                response.headers["Allow"] = self._method
            else:
                response = await self._handler(request)
        except HeadraceError as error:
            refused(error.reason.value)
            response = error_answer(error)
        except Exception:
            _log.exception("an inference call failed")
            response = error_answer(HeadraceError(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text))
        await response(scope, receive, send)


class _Rest:
    """What `/v2` serves."""

    def __init__(self, door: FrontDoor, not_ready: Callable[[], str | None]) -> None:
        self._door = door
        self._readiness = models.Readiness(door, not_ready)

    async def live(self, _request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, _request: Request) -> Response:
        ready = self._readiness.server
        return _json({"ready": ready}, 200 if ready else 503)

    async def server(self, request: Request) -> Response:
        await self._door.auth.from_headers(request.headers)
        return _json(models.server_metadata())

    async def model(self, request: Request) -> Response:
        await self._door.auth.from_headers(request.headers)
        return _json(models.model_metadata(models.find(self._door.models, *_named(request))))

    async def model_ready(self, request: Request) -> Response:
        await self._door.auth.from_headers(request.headers)
        found = models.find(self._door.models, *_named(request))
        ready = self._readiness.why_not(found) is None
        return _json({"name": found.model, "ready": ready}, 200 if ready else 503)

    async def index(self, request: Request) -> Response:
        await self._door.auth.from_headers(request.headers)
        raw = await read_body(request, self._door.settings.body_bytes_max)
        wish = read_json(raw).get("ready") if raw.strip() else None
        if wish is not None and not isinstance(wish, bool):
            raise invalid("ready must be true or false", "ready")
        return _json(self._readiness.index(ready_only=bool(wish)))

    async def not_by_call(self, request: Request) -> Response:
        """A refusal, with nothing of the body read: it may hold a model's files."""
        await self._door.auth.from_headers(request.headers)
        error = models.not_by_call()
        refused(error.reason.value)
        response = error_answer(error)
        response.headers["Allow"] = ""
        return response

    async def nothing(self, request: Request) -> Response:
        raise HeadraceError(Reason.NOT_FOUND, f"there is nothing at {request.url.path}; /docs lists what there is")

    async def infer(self, request: Request) -> Response:
        return await self._whole(request, _read_infer, rendered)

    async def generate(self, request: Request) -> Response:
        return await self._whole(request, read_generate, GenerateResponse.whole)

    async def generate_stream(self, request: Request) -> Response:
        ask, serving = await self._begin(request, _read_stream, parts=True)
        stop = end_when_left(request, serving.call)

        def finish() -> None:
            stop()
            serving.close()

        try:
            await serving.call.verdict()
            return GenerateResponse(ask, serving, finish, self._door.settings)
        except HeadraceError as error:
            finish()
            return _refusal(error, serving.call)
        except asyncio.CancelledError:
            stop()
            return _refusal(serving.cut(), serving.call)

    async def _begin(self, request: Request, read: Read, *, parts: bool = False) -> tuple[Ask, Serving]:
        door = self._door
        arrived_s = asyncio.get_running_loop().time()
        headers = heads(request)
        caller = await door.auth.from_headers(headers)
        leaving = headers.get(DISCONNECT_HEADER.lower())
        raw = await read_body(request, door.settings.body_bytes_max)
        ask = await parsed_beside(raw, lambda: read(raw, request))
        wishes = read_wishes(caller, ask.parameters, headers)
        keyed = CONTINUE if wishes.idempotency_key else CANCEL
        outlives = on_disconnect(leaving, DISCONNECT_HEADER, keyed) == CONTINUE
        serving = await begin(
            door,
            caller,
            ask,
            wishes,
            headers,
            arrived_s,
            protocol="inference",
            outlives=outlives,
            json=True,
            parts=parts,
        )
        return ask, serving

    async def _whole(self, request: Request, read: Read, render: Render) -> Response:
        ask, serving = await self._begin(request, read)
        call = serving.call
        stop = end_when_left(request, call)
        try:
            answer = await serving.whole()
            large = sum(len(tensor.data) for tensor in answer.outputs) > PARSED_AT_ONCE_BYTES
            body, headers = await asyncio.to_thread(render, ask, answer) if large else render(ask, answer)
        except HeadraceError as error:
            return _refusal(error, call)
        except asyncio.CancelledError:
            return _refusal(serving.cut(), call)
        finally:
            stop()
            serving.close()
        return await compressed(request, Response(body, headers={**answer_headers(call), **headers}))


def _read_infer(raw: bytes, request: Request) -> Ask:
    return read_ask(raw, heads(request).get(LENGTH_HEADER.lower()), *_named(request))


def _read_stream(raw: bytes, request: Request) -> Ask:
    return read_generate(raw, request, stream=True)


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["model"], request.path_params.get("version", "")


def _refusal(error: HeadraceError, call: Call) -> Response:
    response = error_answer(error, call.request_id, call.rates)
    response.headers.update(replay_headers(call))
    return response


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
