"""An answer as REST has it: JSON, and after it the binary data of the outputs that were asked for so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from bridge.errors import error_headers
from bridge.inference.asking import Answer, Ask
from bridge.inference.elements import BASE64, to_json
from bridge.inference.rest_requests import CONTENT_TYPE, LENGTH_HEADER, SIZE
from schemas.errors import HeadraceError
from schemas.events import Rates
from schemas.parts import Tensor

OCTETS = "application/octet-stream"


def rendered(ask: Ask, answer: Answer) -> tuple[bytes, dict[str, str]]:
    """The body, and the headers that describe it. Raises HeadraceError (invalid_request) for what JSON can't say."""
    wanted = {each.name: each for each in ask.outputs}
    binary: list[bytes] = []
    outputs = []
    for tensor in answer.outputs:
        own = wanted.get(tensor.name)
        if ask.binary if own is None or own.binary is None else own.binary:
            binary.append(tensor.data)
            outputs.append(_described(tensor, {SIZE: len(tensor.data)}))
        else:
            data, as_base64 = to_json(tensor, as_base64=own is not None and own.as_base64)
            outputs.append({**_described(tensor, {CONTENT_TYPE: BASE64} if as_base64 else {}), "data": data})
    told: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version}
    if answer.id:
        told["id"] = answer.id
    if answer.parameters:
        told["parameters"] = answer.parameters
    head = orjson.dumps({**told, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    if not binary:
        return head, {"Content-Type": "application/json"}
    return b"".join((head, *binary)), {"Content-Type": OCTETS, LENGTH_HEADER: str(len(head))}


def _described(tensor: Tensor, parameters: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
    return {**found, "parameters": parameters} if parameters else found


def error_answer(error: HeadraceError, request_id: str | None = None, rates: Rates | None = None) -> Response:
    """`{"error": text}` with the reason's status."""
    body = orjson.dumps({"error": error.message})
    headers = error_headers(error, request_id, rates)
    return Response(body, error.reason.http_status, headers, media_type="application/json")
