"""The OpenAPI document, made from the models that check and describe what travels, and a page that shows it without any CDN."""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from bridge import openai_answers as answers
from bridge.idempotency import KEY_HEADER
from bridge.inference import description as inference
from bridge.limits import RATE_HEADERS
from bridge.openai_inputs import ClassificationRequest, EmbeddingRequest
from bridge.openai_models import ChatRequest, CompletionRequest
from decisions.validation import KEY_CHARS_MAX

VERSION = "0.1.0"
_REF = "#/components/schemas/{model}"
_MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ClassificationRequest,
    answers.ChatAnswer,
    answers.ChatChunk,
    answers.CompletionAnswer,
    answers.EmbeddingAnswer,
    answers.ClassificationAnswer,
    answers.ModelAnswer,
    answers.ModelsAnswer,
    answers.CancelAnswer,
    answers.ErrorAnswer,
)
_ERRORS = {
    "400": "The request is not valid, or asks for what isn't served.",
    "401": "The API key is missing, unknown or revoked.",
    "403": "The key may not do this.",
    "404": "There is no such thing.",
    "409": "The idempotency key was used for another request.",
    "413": "The body is too large.",
    "429": "A limit is reached; see Retry-After.",
    "500": "The model or Headrace failed.",
    "503": "It can't be served at present, or not before its deadline; see Retry-After.",
    "504": "The deadline passed.",
}
_DESCRIPTION = """An OpenAI-compatible front door. What this version doesn't serve is refused by name; no parameter is silently ignored.

A stream outlives its connection: each of its events has an id, and `GET /v1/streams/{request id}` with that id in `Last-Event-ID` goes on
with exactly what follows it, on any front door. Ids are opaque. To be able to come back after a disconnect, ask with
`X-Headrace-On-Disconnect: continue` or under an `Idempotency-Key`; else a disconnect cancels.

`/v1/stream` is a WebSocket that carries several calls at once, each with the caller's own id:
send `{"type": "request", "id": "a", "endpoint": "chat.completions", "body": {…}}`,
`{"type": "resume", "id": "a", "request_id": …, "last_event_id": …}` and `{"type": "cancel", "id": "a"}`;
get `started`, `chunk`, and `done` or `error`. Without an `Authorization` header send `{"type": "auth", "api_key": …}` first. A request may have
`idempotency_key`, `cache_control` and `on_disconnect`; `started` tells `replayed` where it was asked before.

Where a limit holds, an answer and a 429 tell in OpenAI's `x-ratelimit-*` headers what is left of it. A WebSocket's `started` and `error`
have the same as `rate_limits`, and `retry_after_ms`.

Where a model has a response cache, an answer at temperature 0 may come from it: `X-Headrace-Cache` says so, and `Cache-Control` asks
otherwise. A WebSocket's request has the field `cache_control` for it, and its `started` the field `cache`.

A request's body may be compressed: `Content-Encoding: gzip` or `deflate`.

`/v2` is the Open Inference Protocol with Triton's binary tensor data, model repository and generate extensions; the same is served by gRPC.
"""
_RATES = {
    "limit": "Of the limits that hold, the one with the least left.",
    "remaining": "What is left of it.",
    "reset": "When all of it is free again, such as `6m0s`, if no other request comes.",
}
_RATE_TYPES = {"limit": "integer", "remaining": "integer", "reset": "string"}
_EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"model": "smollm2", "messages": [{"role": "user", "content": "Name three rivers."}]},
    CompletionRequest: {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 16},
    EmbeddingRequest: {"model": "minilm", "input": ["Rivers flow to the sea.", "Water turns the mill."]},
    ClassificationRequest: {"model": "magika", "input": "import os\nprint(os.name)\n", "top_k": 3},
}
"""What the page offers to try. Without these it would make up a body with every field there is."""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Headrace</title>
<link rel="stylesheet" href="/docs/static/swagger-ui.css">
<link rel="icon" type="image/png" href="/docs/static/favicon-32x32.png">
</head>
<body>
<div id="page"></div>
<script src="/docs/static/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#page", deepLinking: true});</script>
</body>
</html>
"""


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _events(*chunks: type[BaseModel]) -> dict[str, Any]:
    """Server-sent events, as OpenAPI describes one: an object whose data is text. That is JSON, a chunk or an error, and at last `[DONE]`."""
    kinds: tuple[type[BaseModel], ...] = (*chunks, answers.ErrorAnswer)
    told = [{"$ref": _REF.format(model=kind.__name__)} for kind in kinds]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": told}}
    done = {"const": "[DONE]", "description": "The end of an answer that is whole."}
    place = {"type": "string", "description": "The stream goes on after this by `Last-Event-ID`."}
    event = {"type": "object", "properties": {"id": place, "data": {"anyOf": [data, done]}}, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


def _errors(*statuses: str) -> dict[str, Any]:
    return {status: {"description": _ERRORS[status], "content": _content(answers.ErrorAnswer)} for status in statuses}


def _header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


def _cache_headers() -> dict[str, Any]:
    return {
        "X-Headrace-Cache": _header("`hit`, or `miss`, where the response cache plays a part."),
        "Age": _header("Of a hit: how long ago it was generated, in seconds.", "integer"),
    }


def _rate_headers() -> dict[str, Any]:
    return {name: _header(_RATES[name.split("-")[2]], _RATE_TYPES[name.split("-")[2]]) for name in RATE_HEADERS}


def _parameter(name: str, place: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": description, "schema": schema}


_ON_DISCONNECT = _parameter(
    "X-Headrace-On-Disconnect",
    "header",
    "What becomes of the request when this connection ends before it. Without it a call is cancelled, unless it has an `Idempotency-Key`; a resumed stream is not.",
    type="string",
    enum=["cancel", "continue"],
)


_KEY = _parameter(
    KEY_HEADER,
    "header",
    "Makes a repeat safe: whoever sends the same request again under this key, within a day, gets the first one's answer from its start, "
    "also if it has ended. A disconnect doesn't cancel then. `Idempotent-Replayed: true` tells that the answer is an earlier one's.",
    type="string",
    minLength=1,
    maxLength=KEY_CHARS_MAX,
)
_CACHE_CONTROL = _parameter(
    "Cache-Control",
    "header",
    "Of the response cache: `no-cache` (a new answer), `no-store` (don't keep mine), `max-age=SECONDS` (none that is older).",
    type="string",
)


def _resume() -> dict[str, Any]:
    place = "The id of the last event that the caller had. Without it the stream starts from its beginning."
    replay = "Without an event's id, which tells it:"
    return {
        "summary": "Resume a stream, or replay it",
        "description": "An answer to several prompts can't be resumed: its events have no ids, and its `X-Request-Id` names the first alone.",
        "parameters": [
            _parameter("stream", "path", "`X-Request-Id` of the call, or the `id` of its chunks.", type="string"),
            _parameter("Last-Event-ID", "header", place, type="string"),
            _parameter("last_event_id", "query", "The same, for callers that can't send headers.", type="string"),
            _parameter("format", "query", f"{replay} how chunks look.", type="string", enum=["chat", "completion"]),
            _parameter("include_usage", "query", f"{replay} whether the usage comes at the end.", type="boolean"),
            _ON_DISCONNECT,
        ],
        "responses": {
            "200": {
                "description": "The chunks that follow, then `[DONE]`.",
                "content": _events(answers.ChatChunk, answers.CompletionAnswer),
            },
            **_errors("400", "401", "403", "404", "429", "500", "503", "504"),
        },
    }


def _cancel() -> dict[str, Any]:
    return {
        "summary": "Cancel a request",
        "description": "Whoever waits for its answer hears that it was cancelled. What has ended stays as it is; to cancel twice is no error.",
        "parameters": [
            _parameter("stream", "path", "`X-Request-Id` of the call, or the `id` of its chunks.", type="string")
        ],
        "responses": {
            "202": {"description": "It is being cancelled.", "content": _content(answers.CancelAnswer)},
            **_errors("400", "401", "403", "404", "429", "503"),
        },
    }


def _call(
    summary: str, body: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel] | None = None
) -> dict[str, Any]:
    header = {
        "name": "X-Headrace-Timeout-Ms",
        "in": "header",
        "required": False,
        "description": "The deadline, from now. The shorter of this and the body's `timeout` holds.",
        "schema": {"type": "integer", "minimum": 1},
    }
    streams = "; with `stream: true` server-sent events, each a chunk, then `[DONE]`" if chunk else ""
    answer = {
        "description": f"The answer{streams}.",
        "headers": {"X-Request-Id": _header("Names the request in the log."), **_rate_headers(), **_cache_headers()},
        "content": _content(whole) | (_events(chunk) if chunk else {}),
    }
    errors = _errors(*_ERRORS)
    wait = {"Retry-After": _header("Seconds to wait.", "integer")}
    errors["429"]["headers"] = {**wait, **_rate_headers()}
    errors["503"]["headers"] = wait
    return {
        "summary": summary,
        "description": " ".join((body.__doc__ or "").split()),
        "parameters": [header, _ON_DISCONNECT, _KEY, _CACHE_CONTROL],
        "requestBody": {
            "required": True,
            "content": {"application/json": {**_content(body)["application/json"], "example": _EXAMPLES[body]}},
        },
        "responses": {"200": answer, **errors},
    }


def _get(summary: str, answer: type[BaseModel], *errors: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": "Found.", "content": _content(answer)}, **_errors(*errors)},
    }


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": VERSION, "description": _DESCRIPTION},
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": {
                "post": _call("Answer a chat", ChatRequest, answers.ChatAnswer, answers.ChatChunk)
            },
            "/v1/completions": {
                "post": _call(
                    "Continue a prompt", CompletionRequest, answers.CompletionAnswer, answers.CompletionAnswer
                )
            },
            "/v1/embeddings": {"post": _call("Embed texts", EmbeddingRequest, answers.EmbeddingAnswer)},
            "/v1/classifications": {
                "post": _call("Classify texts or bytes", ClassificationRequest, answers.ClassificationAnswer)
            },
            "/v1/streams/{stream}": {"get": _resume(), "delete": _cancel()},
            "/v1/models": {"get": _get("List the models", answers.ModelsAnswer, "401", "403")},
            "/v1/models/{model}": {
                "get": {**_get("Look a model up", answers.ModelAnswer, "401", "403", "404"), "parameters": [model]}
            },
            **inference.paths(),
        },
        "components": {
            "schemas": {**schemas["$defs"], **inference.schemas()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key: hr-…"}},
        },
    }


async def _document(_request: Request) -> Response:
    return Response(orjson.dumps(document()), media_type="application/json")


async def _page(_request: Request) -> Response:
    return HTMLResponse(_PAGE)


def docs_routes() -> list[BaseRoute]:
    """`/openapi.json`, and `/docs` with all that it loads."""
    static = StaticFiles(packages=[("swagger_ui", "static")])
    return [
        Route("/openapi.json", _document, methods=["GET"]),
        Route("/docs", _page, methods=["GET"]),
        Mount("/docs/static", static),
    ]
