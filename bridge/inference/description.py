"""What the OpenAPI page says of `/v2`."""

from __future__ import annotations

from typing import Any

from bridge.inference.models import TEXT_INPUT, TEXT_OUTPUT
from bridge.inference.parameters import TIERS, TIMEOUT_HEADER
from bridge.inference.rest_answers import OCTETS
from bridge.inference.rest_requests import LENGTH_HEADER
from schemas.tensors import DATATYPES, RANK_MAX

_STATUSES = {
    "400": "Names, datatypes, shapes or counts aren't what the model takes, or a parameter isn't served.",
    "401": "The API key is missing, unknown or revoked.",
    "403": "The key may not do this.",
    "404": "No such model is deployed, or not in this version.",
    "405": "It isn't done by a call.",
    "409": "The idempotency key was used for another request.",
    "413": "The body is too large.",
    "429": "A limit is reached; see Retry-After.",
    "500": "The model or Headrace failed; the text is the model's own.",
    "503": "It can't be served at present, or not before its deadline; see Retry-After.",
    "504": "The deadline passed.",
}
_READ = ("401", "403", "404")
_INFER = (
    "Tensors in JSON, flat or nested in row-major order, or as binary data after it (the binary tensor data extension). NaN and the infinities are "
    '"NaN", "Infinity" and "-Infinity". BYTES are texts, or base64 where a tensor\'s parameter `content_type` is `base64`. Parameters: `timeout` '
    "(microseconds), `tier`, `priority` (1: interactive, above: batch), `idempotency_key`, `cache_control`, `binary_data_output`, and the model's own."
)
_SCALARS = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
_TENSOR = {
    "name": {"type": "string", "minLength": 1},
    "datatype": {"enum": list(DATATYPES)},
    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": RANK_MAX},
    "data": {"type": "array"},
}
_SPECS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "datatype": {"enum": list(DATATYPES)},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
        },
        "required": ["name", "datatype", "shape"],
    },
}
_INPUT_PARAMETERS = {
    "type": "object",
    "properties": {"binary_data_size": {"type": "integer", "minimum": 0}, "content_type": {"const": "base64"}},
    "additionalProperties": False,
}
_OUTPUT_PARAMETERS = {
    "type": "object",
    "properties": {"binary_data": {"type": "boolean"}, "content_type": {"const": "base64"}},
    "additionalProperties": False,
}


def schemas() -> dict[str, Any]:
    """The components."""
    return {
        "InferenceError": _object({"error": {"type": "string"}}, "error"),
        "InferenceInput": {
            **_object({**_TENSOR, "parameters": _INPUT_PARAMETERS}, "name", "datatype", "shape"),
            "additionalProperties": False,
        },
        "InferenceWanted": {
            **_object({"name": _TENSOR["name"], "parameters": _OUTPUT_PARAMETERS}, "name"),
            "additionalProperties": False,
        },
        "InferenceOutput": _object({**_TENSOR, "parameters": _SCALARS}, "name", "datatype", "shape"),
        "InferenceRequest": {
            **_object(
                {
                    "id": {"type": "string"},
                    "parameters": _SCALARS,
                    "inputs": {"type": "array", "items": _ref("InferenceInput"), "minItems": 1},
                    "outputs": {"type": "array", "items": _ref("InferenceWanted")},
                },
                "inputs",
            ),
            "additionalProperties": False,
        },
        "InferenceAnswer": _object(
            {
                "model_name": {"type": "string"},
                "model_version": {"type": "string"},
                "id": {"type": "string"},
                "parameters": _SCALARS,
                "outputs": {"type": "array", "items": _ref("InferenceOutput")},
            },
            "model_name",
            "outputs",
        ),
        "ServerMetadata": _object(
            {"name": {"type": "string"}, "version": {"type": "string"}, "extensions": _list("string")},
            "name",
            "version",
            "extensions",
        ),
        "ModelMetadata": _object(
            {
                "name": {"type": "string"},
                "versions": _list("string"),
                "platform": {"type": "string"},
                "inputs": _SPECS,
                "outputs": _SPECS,
            },
            "name",
            "platform",
            "inputs",
            "outputs",
        ),
        "GenerateRequest": _object(
            {TEXT_INPUT: {"type": "string"}, "id": {"type": "string"}, "parameters": _SCALARS}, TEXT_INPUT
        ),
        "GenerateAnswer": _object(
            {
                "model_name": {"type": "string"},
                "model_version": {"type": "string"},
                TEXT_OUTPUT: {"type": ["string", "array"], "items": {"type": "string"}},
            },
            TEXT_OUTPUT,
        ),
    }


def paths() -> dict[str, Any]:
    """The paths; those of a model also with its version."""
    found: dict[str, Any] = {
        "/v2": {"get": _get("Describe the server", "ServerMetadata", "401", "403")},
        "/v2/health/live": {"get": _health("Whether the server lives", "live")},
        "/v2/health/ready": {"get": _health("Whether the server takes calls", "ready")},
        "/v2/repository/index": {
            "post": {
                "summary": "List the models with their versions, all or those that are ready",
                "requestBody": _body(_object({"ready": {"type": "boolean"}}), required=False),
                "responses": {"200": _answer({"type": "array"}), **_errors("400", "401", "403", "413")},
            }
        },
    }
    model = _path("model")
    for name in ("load", "unload"):
        found[f"/v2/repository/models/{{model}}/{name}"] = {
            "post": {
                "summary": f"Refused: a model is {name}ed by its workers, and not by a call",
                "parameters": [model],
                "responses": _errors("401", "403", "404", "405"),
            }
        }
    for path, parameters in (
        ("/v2/models/{model}", [model]),
        ("/v2/models/{model}/versions/{version}", [model, _path("version")]),
    ):
        found[path] = {"get": {**_get("Describe a model", "ModelMetadata", *_READ), "parameters": parameters}}
        ready = {**_health("Whether a worker of a model is ready", "ready", *_READ), "parameters": parameters}
        del ready["security"]
        found[f"{path}/ready"] = {"get": ready}
        found[f"{path}/infer"] = {"post": _infer(parameters)}
        whole = _answer(_ref("GenerateAnswer"))
        found[f"{path}/generate"] = {"post": _generate("Continue a text", parameters, whole)}
        events = {**whole, "content": {"text/event-stream": {"schema": _event("GenerateAnswer")}}}
        found[f"{path}/generate_stream"] = {"post": _generate("Continue a text, as events", parameters, events)}
    return found


def _event(schema: str) -> dict[str, Any]:
    """A server-sent event, as OpenAPI describes one: an object, whose data is text that is JSON."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(schema)}
    return _object({"data": data}, "data")


def _infer(parameters: list[Any]) -> dict[str, Any]:
    length = {"name": LENGTH_HEADER, "in": "header", "required": False, "schema": {"type": "integer", "minimum": 0}}
    description = "How long the JSON is, where binary data follows it."
    octets = {OCTETS: {"schema": {"type": "string", "format": "binary"}}}
    answer = _answer(_ref("InferenceAnswer"))
    return {
        "summary": "Infer",
        "description": _INFER,
        "parameters": [*parameters, {**length, "description": description}, _timeout()],
        "requestBody": _body(_ref("InferenceRequest")),
        "responses": {"200": {**answer, "content": {**answer["content"], **octets}}, **_errors(*_STATUSES)},
    }


def _generate(summary: str, parameters: list[Any], answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "description": (
            "Triton's generate extension. Parameters are those of `/v1/completions`, and what `infer` takes; lists and objects go into "
            "`sampling_parameters`, a string that is a JSON object."
        ),
        "parameters": [*parameters, _timeout()],
        "requestBody": _body(_ref("GenerateRequest")),
        "responses": {"200": answer, **_errors(*_STATUSES)},
    }


def _timeout() -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 1, "maximum": 86_400_000}
    text = f"The deadline, from now. The shorter of this and the parameter `timeout` holds. Tiers: {', '.join(TIERS)}."
    return {"name": TIMEOUT_HEADER, "in": "header", "required": False, "description": text, "schema": schema}


def _get(summary: str, schema: str, *errors: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _answer(_ref(schema)), **_errors(*errors)}}


def _health(summary: str, name: str, *errors: str) -> dict[str, Any]:
    answer = _answer(_object({name: {"type": "boolean"}}, name))
    return {"summary": summary, "security": [], "responses": {"200": answer, "503": answer, **_errors(*errors)}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(kind: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": kind}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def _answer(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "Found.", "content": {"application/json": {"schema": schema}}}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("InferenceError")}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}
