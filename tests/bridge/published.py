"""The protocol's REST description, as kserve/open-inference-protocol publishes it in `open_inference_rest.yaml`: its paths and their schemas."""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT, _WHOLE, _PARAMETERS = {"type": "string"}, {"type": "integer"}, {"type": "object"}
_DATA = _list({"anyOf": [{"$ref": "#/components/schemas/tensor_data"}, {"type": "number"}, _TEXT, {"type": "boolean"}]})
_TENSOR = {
    "name": _TEXT,
    "shape": _list(_WHOLE),
    "datatype": _TEXT,
    "parameters": _PARAMETERS,
    "data": {"$ref": "#/components/schemas/tensor_data"},
}
_WHOLE_TENSOR = _object(("name", "shape", "datatype", "data"), **_TENSOR)
_METADATA = _list(_object(("name", "datatype", "shape"), name=_TEXT, datatype=_TEXT, shape=_list(_WHOLE)))
_ERROR = _object(("error",), error=_TEXT)


def _json(schema: Any) -> dict[str, Any]:
    return {"description": "", "content": {"application/json": {"schema": schema}}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


_MODEL = [_path("model"), _path("version")]
_SERVER = _object(("name", "version", "extensions"), name=_TEXT, version=_TEXT, extensions=_list(_TEXT))
_ABOUT = _object(
    ("name", "platform"), name=_TEXT, versions=_list(_TEXT), platform=_TEXT, inputs=_METADATA, outputs=_METADATA
)
_WANTED = _list(_object(("name",), name=_TEXT, parameters=_PARAMETERS))
_ASKED = _object(("inputs",), id=_TEXT, parameters=_PARAMETERS, inputs=_list(_WHOLE_TENSOR), outputs=_WANTED)
_ANSWER = _object(
    ("model_name", "outputs"),
    model_name=_TEXT,
    model_version=_TEXT,
    id=_TEXT,
    parameters=_PARAMETERS,
    outputs=_list(_WHOLE_TENSOR),
)
_INFER = {
    "requestBody": {"content": {"application/json": {"schema": _ASKED}}},
    "responses": {"200": _json(_ANSWER), "400": _json(_ERROR)},
}
_VERSION = "/v2/models/{model}/versions/{version}"
PUBLISHED: dict[str, Any] = {
    "openapi": "3.0.0",
    "info": {"title": "Data Plane", "version": "2.0"},
    "paths": {
        "/v2/health/live": {"get": {"responses": {"200": {"description": ""}}}},
        "/v2/health/ready": {"get": {"responses": {"200": {"description": ""}}}},
        "/v2/": {"get": {"responses": {"200": _json(_SERVER), "400": _json(_ERROR)}}},
        f"{_VERSION}/ready": {"get": {"parameters": _MODEL, "responses": {"200": {"description": ""}}}},
        _VERSION: {"get": {"parameters": _MODEL, "responses": {"200": _json(_ABOUT)}}},
        f"{_VERSION}/infer": {"post": {"parameters": _MODEL, **_INFER}},
    },
    "components": {"schemas": {"tensor_data": _DATA}},
}
