"""A tensor's elements as JSON has them, flat or nested, to the protocol's own bytes and back.

Of what JSON can't say: NaN and the infinities are the words "NaN", "Infinity" and "-Infinity", both ways; a null is taken for NaN. Elements
of BYTES are UTF-8 texts, or base64 where the tensor's parameter `content_type` is `base64`. BF16 has no form in JSON.
"""

from __future__ import annotations

import base64
import binascii
import math
from itertools import chain
from typing import Any

import numpy as np

from schemas.errors import HeadraceError
from schemas.parts import Tensor
from schemas.reasons import Reason
from schemas.tensors import BYTES, ITEM_BYTES, elements, pack, unpack

BASE64 = "base64"
BF16 = "BF16"
WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
NUMPY = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""By datatype, numpy's name of it. BF16 and BYTES have none."""
FLOATS = ("FP16", "FP32", "FP64")


def from_json(where: str, datatype: str, shape: tuple[int, ...], data: Any, *, as_base64: bool = False) -> bytes:
    """The bytes of `data`, a list that is flat, or nested as `shape` says. Raises HeadraceError (invalid_request) naming `where`."""
    if datatype == BF16:
        raise invalid(f"{where}: {BF16} has no form in JSON; send it as binary data", where)
    flat = _flat(where, shape, data)
    if datatype == BYTES:
        return pack(_texts(where, flat, as_base64))
    if datatype == "BOOL":
        _all_of(where, datatype, flat, (bool,), "true or false")
        return np.array(flat, dtype="?").tobytes()
    return _floats(where, datatype, flat) if datatype in FLOATS else _integers(where, datatype, flat)


def to_json(tensor: Tensor, *, as_base64: bool = False) -> tuple[Any, bool]:
    """The elements, flat, as orjson takes them, and whether they are base64: as asked, or because one isn't UTF-8.

    Raises HeadraceError (invalid_request) for BF16.
    """
    if tensor.datatype == BF16:
        raise invalid(f"{tensor.name}: {BF16} has no form in JSON; ask for it as binary data", "outputs")
    if tensor.datatype == BYTES:
        return _told(list(unpack(tensor.data)), as_base64)
    values = array(tensor).reshape(-1)
    if tensor.datatype not in FLOATS or bool(np.isfinite(values).all()):
        return values, False
    return [_word(value) for value in values.tolist()], False


def array(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """A view of a tensor's data, in its shape. Not for BYTES and BF16."""
    return np.frombuffer(tensor.data, dtype=NUMPY[tensor.datatype]).reshape(tensor.shape)


def invalid(message: str, param: str | None = None) -> HeadraceError:
    """A caller's fault."""
    return HeadraceError(Reason.INVALID_REQUEST, message, param=param)


def _flat(where: str, shape: tuple[int, ...], data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise invalid(f"{where}: data must be a list", where)
    if data and isinstance(data[0], list):
        for level, extent in enumerate(shape):
            if level == 0:
                _same_length(where, shape, [data], extent)
                continue
            if not all(isinstance(part, list) for part in data):
                raise invalid(f"{where}: data is neither flat nor nested as the shape {list(shape)} says", where)
            _same_length(where, shape, data, extent)
            data = list(chain.from_iterable(data))
    expected = elements(shape)
    if len(data) != expected:
        raise invalid(f"{where}: the shape {list(shape)} takes {expected} elements, and {len(data)} are given", where)
    return list(data)


def _same_length(where: str, shape: tuple[int, ...], parts: list[Any], extent: int) -> None:
    wrong = next((len(part) for part in parts if len(part) != extent), None)
    if wrong is not None:
        raise invalid(
            f"{where}: data has a list of {wrong} where the shape {list(shape)} has an extent of {extent}", where
        )


def _all_of(where: str, datatype: str, flat: list[Any], kinds: tuple[type, ...], what: str) -> None:
    if set(map(type, flat)) <= set(kinds):
        return
    index = next(i for i, value in enumerate(flat) if type(value) not in kinds)
    raise invalid(f"{where}: element {index} must be {what}, as {datatype} is", where)


def _texts(where: str, flat: list[Any], as_base64: bool) -> list[bytes]:
    _all_of(where, BYTES, flat, (str,), "a string")
    if not as_base64:
        return [text.encode() for text in flat]
    found = []
    for index, text in enumerate(flat):
        try:
            found.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise invalid(f"{where}: element {index} isn't base64", where) from None
    return found


def _integers(where: str, datatype: str, flat: list[Any]) -> bytes:
    bits = 8 * ITEM_BYTES[datatype]
    low, high = (0, (1 << bits) - 1) if datatype.startswith("U") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    whole = set(map(type, flat)) <= {int}
    if flat and not (whole and low <= min(flat) and max(flat) <= high):
        index = next(i for i, value in enumerate(flat) if type(value) is not int or not low <= value <= high)
        if type(flat[index]) is not int and not _beyond(flat[index], low, high):
            _all_of(where, datatype, flat, (int,), "a whole number")
        raise invalid(f"{where}: element {index} is out of the range of {datatype}, {low} to {high}", where)
    return np.array(flat, dtype=NUMPY[datatype]).tobytes()


def _beyond(value: Any, low: int, high: int) -> bool:
    """Whether it is a number out of range: a whole one of more than 64 bits is read as a float, and one just below as the least of 64 bits."""
    return type(value) is float and math.isfinite(value) and (not low <= value <= high or value <= -(2.0**63))


def _floats(where: str, datatype: str, flat: list[Any]) -> bytes:
    kinds = set(map(type, flat))
    finite = kinds <= {int, float}
    if not finite:
        flat = [
            WORDS.get(value, value) if type(value) is str else WORDS["NaN"] if value is None else value
            for value in flat
        ]
        _all_of(where, datatype, flat, (int, float), 'a number, "NaN", "Infinity" or "-Infinity"')
    try:
        exact = np.array(flat, dtype="<f8")
    except OverflowError:
        raise invalid(f"{where}: an element is out of the range of {datatype}", where) from None
    with np.errstate(over="ignore"):
        found = exact.astype(NUMPY[datatype])
    beyond = np.isinf(found) & np.isfinite(exact)
    if beyond.any():
        raise invalid(f"{where}: element {int(beyond.argmax())} is out of the range of {datatype}", where)
    return found.tobytes()


def _word(value: float) -> float | str:
    if value - value == 0.0:
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124 - what NaN is


def _told(values: list[bytes], as_base64: bool) -> tuple[list[str], bool]:
    if not as_base64:
        try:
            return [value.decode() for value in values], False
        except UnicodeDecodeError:
            pass
    return [base64.b64encode(value).decode() for value in values], True
