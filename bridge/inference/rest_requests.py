"""An inference request as REST brings it: JSON, and after it the binary data of the tensors that say so.

The binary tensor data extension: `Inference-Header-Content-Length` tells how long the JSON is, and the parameter `binary_data_size` of an
input how much of what follows is its own, in the order of the inputs. Nothing may be left over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson

from bridge.body import parse_object
from bridge.inference.asking import ID_CHARS_MAX, Ask, Parameters, Wanted
from bridge.inference.elements import BASE64, from_json, invalid
from schemas.errors import HeadraceError
from schemas.parts import Tensor
from schemas.reasons import Reason
from schemas.tensors import BYTES, DATATYPES, ELEMENTS_MAX, RANK_MAX, TENSORS_MAX

LENGTH_HEADER = "Inference-Header-Content-Length"
SIZE, BINARY, BINARY_OUTPUT, CONTENT_TYPE = "binary_data_size", "binary_data", "binary_data_output", "content_type"


def read_ask(raw: bytes, json_length: str | None, model: str, version: str) -> Ask:
    """What a body asks. `json_length` is the header's value. Raises HeadraceError: invalid_request, unsupported_parameter."""
    head, data = split(raw, json_length)
    body = read_json(head)
    _only(body, "", ("id", "parameters", "inputs", "outputs", "model_name", "model_version"))
    for field, value in (("model_name", model), ("model_version", version)):
        if value and body.get(field) not in (None, "", value):
            raise invalid(f"{field} is not the one in the path", field)
    parameters = dict(scalars(body.get("parameters"), "parameters"))
    binary = _flag(parameters.pop(BINARY_OUTPUT, False), f"parameters.{BINARY_OUTPUT}")
    cursor = _Binary(data, json_length is not None)
    inputs = [_input(item, f"inputs[{i}]", cursor) for i, item in enumerate(_objects(body.get("inputs"), "inputs"))]
    cursor.require_all()
    outputs = [_output(item, f"outputs[{i}]") for i, item in enumerate(_objects(body.get("outputs") or [], "outputs"))]
    return Ask(model, version, read_id(body.get("id")), parameters, tuple(inputs), tuple(outputs), binary)


def split(raw: bytes, json_length: str | None) -> tuple[bytes, bytes]:
    """A body's JSON and its binary data. Raises HeadraceError (invalid_request)."""
    if json_length is None:
        return raw, b""
    if not (json_length.isascii() and json_length.isdecimal() and len(json_length) <= 12):
        raise invalid(f"{LENGTH_HEADER} must be a whole number of bytes", LENGTH_HEADER)
    length = int(json_length)
    if length > len(raw):
        raise invalid(f"{LENGTH_HEADER} is {length}, and the body has {len(raw)} bytes", LENGTH_HEADER)
    return raw[:length], raw[length:]


def read_json(raw: bytes) -> dict[str, Any]:
    """The JSON object. NaN, Infinity and -Infinity are taken without quotes, too, as Python's and Triton's clients write them: they are numbers."""
    try:
        return parse_object(raw)
    except HeadraceError as error:
        if b"NaN" not in raw and b"Infinity" not in raw:
            raise
        try:
            found = json.loads(raw.decode(), parse_constant=float, parse_float=_finite, parse_int=_whole)
            orjson.dumps(found)  # whatever isn't text
        except (ValueError, TypeError, RecursionError):
            raise error from None
        if not isinstance(found, dict):
            raise
        return found


def _finite(text: str) -> float:
    """A number as it is written. Raises ValueError for one that no double holds: that isn't how infinity is told."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is out of range")
    return number


def _whole(text: str) -> int | float:
    """A whole number as it is written; a float where 64 bits don't hold it, as orjson has it."""
    number = int(text)
    return number if -(1 << 63) <= number < 1 << 64 else _finite(text)


def read_id(value: Any) -> str:
    """The caller's name for its request. Raises HeadraceError (invalid_request)."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > ID_CHARS_MAX:
        raise invalid(f"id must be a string of at most {ID_CHARS_MAX} characters", "id")
    return value


def scalars(value: Any, where: str, refusal: str = "must be a string, a number or a boolean") -> Parameters:
    """Parameters: an object of strings, numbers and booleans, or nothing; what is null isn't given. `refusal` is said of any other."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object", where)
    for name, held in value.items():
        if held is not None and not _is_scalar(held):
            raise invalid(f"{where}.{name} {refusal}", f"{where}.{name}")
    return {name: held for name, held in value.items() if held is not None}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


class _Binary:
    """What follows the JSON, given out in order."""

    def __init__(self, data: bytes, told: bool) -> None:
        self._data = data
        self._told = told
        self._at = 0

    def take(self, size: Any, where: str) -> bytes:
        name = f"{where}.parameters.{SIZE}"
        if type(size) is not int or size < 0:
            raise invalid(f"{name} must be a whole number of bytes", name)
        if not self._told:
            raise invalid(f"{name} needs the header {LENGTH_HEADER}", name)
        left = len(self._data) - self._at
        if size > left:
            raise invalid(f"{name} is {size}, and only {left} bytes of binary data are left", name)
        self._at += size
        return self._data[self._at - size : self._at]

    def require_all(self) -> None:
        if self._at != len(self._data):
            text = f"the body has {len(self._data)} bytes after its JSON, and the inputs name {self._at} of them"
            raise invalid(text, SIZE)


def _input(item: Mapping[str, Any], where: str, binary: _Binary) -> Tensor:
    _only(item, where, ("name", "shape", "datatype", "parameters", "data"))
    name, datatype = _string(item.get("name"), f"{where}.name"), _string(item.get("datatype"), f"{where}.datatype")
    if datatype not in DATATYPES:
        raise invalid(f"{where}.datatype must be one of {', '.join(DATATYPES)}", f"{where}.datatype")
    shape = _shape(item.get("shape"), f"{where}.shape")
    parameters = scalars(item.get("parameters"), f"{where}.parameters")
    _only(parameters, f"{where}.parameters", (SIZE, CONTENT_TYPE))
    as_base64 = _as_base64(parameters, f"{where}.parameters")
    if as_base64 and datatype != BYTES:
        raise invalid(f"{where}: only {BYTES} may be {BASE64}", where)
    if SIZE in parameters:
        if item.get("data") is not None:
            raise invalid(f"{where} has both data and {SIZE}", where)
        return Tensor(name, datatype, shape, binary.take(parameters[SIZE], where))
    if "data" not in item:
        raise invalid(f"{where}.data is required", f"{where}.data")
    return Tensor(name, datatype, shape, from_json(where, datatype, shape, item["data"], as_base64=as_base64))


def _output(item: Mapping[str, Any], where: str) -> Wanted:
    _only(item, where, ("name", "parameters"))
    parameters = scalars(item.get("parameters"), f"{where}.parameters")
    _only(parameters, f"{where}.parameters", (BINARY, CONTENT_TYPE))
    binary = _flag(parameters[BINARY], f"{where}.parameters.{BINARY}") if BINARY in parameters else None
    return Wanted(_string(item.get("name"), f"{where}.name"), binary, _as_base64(parameters, f"{where}.parameters"))


def _as_base64(parameters: Parameters, where: str) -> bool:
    kind = parameters.get(CONTENT_TYPE)
    if kind not in (None, BASE64):
        raise invalid(f"{where}.{CONTENT_TYPE} may only be {BASE64}", f"{where}.{CONTENT_TYPE}")
    return kind == BASE64


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid(f"{where} must be a list", where)
    if len(value) > TENSORS_MAX:
        raise invalid(f"{where} has {len(value)} items; at most {TENSORS_MAX} are taken", where)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise invalid(f"{where}[{index}] must be an object", f"{where}[{index}]")
    return value


def _only(given: Mapping[str, Any], where: str, known: tuple[str, ...]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        name = f"{where}.{unknown}" if where else unknown
        raise HeadraceError(Reason.UNSUPPORTED_PARAMETER, f"{name} is not served", param=name)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(f"{where} must be a string, and not empty", where)
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{where} must be true or false", where)
    return value


def _shape(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(extent) is int and 0 <= extent <= ELEMENTS_MAX for extent in value):
        raise invalid(f"{where} must be a list of whole numbers from 0 to {ELEMENTS_MAX}", where)
    if len(value) > RANK_MAX:
        raise invalid(f"{where} has {len(value)} dimensions; at most {RANK_MAX} are taken", where)
    return tuple(value)
