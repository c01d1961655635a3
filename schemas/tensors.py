"""Tensors as the Open Inference Protocol has them: their datatypes, their bytes, and what fits a model's signature.

A tensor's `data` is its elements in row-major order, little-endian, without padding; each element of BYTES is four bytes of length
(unsigned, little-endian) and as many bytes. That is the protocol's own binary form (kserve `required_api.md`, "Tensor Data"; Triton
`extension_binary_data.md`), so a tensor crosses every hop as it came. BOOL is one byte, 0 or 1. BF16 is the upper half of FP32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from schemas.errors import HeadraceError
from schemas.parts import Tensor, TensorSpec
from schemas.reasons import Reason
from schemas.topics import REQUEST_MAX_BYTES

BYTES = "BYTES"
ITEM_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
"""Bytes of an element, by datatype; an element of BYTES has its own length."""
DATATYPES = (*ITEM_BYTES, BYTES)
ANY = -1
"""In a specification: any extent."""
RANK_MAX = 16
TENSORS_MAX = 256
NAME_CHARS_MAX = 256
ELEMENTS_MAX = REQUEST_MAX_BYTES
"""A tensor's extents, without those that are 0, multiply to no more: an element takes a byte or more, so no request that fits is
refused, and nothing that goes through a tensor's rows goes on for ever where its rows are empty."""
STRINGS_MAX = 65_536
"""Elements of BYTES in a request's tensor: counting them, and making texts of them, goes through them one by one."""
LENGTH_BYTES = 4
ROWS_TOLD_MAX = 8
"""Of so many tensors that differ in their number of rows each is named."""
_LENGTH = struct.Struct("<I")


def pack(elements: Iterable[bytes]) -> bytes:
    """The data of a BYTES tensor."""
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))


def unpack(data: bytes) -> Iterator[bytes]:
    """The elements of a BYTES tensor. Raises ValueError if `data` is cut."""
    at, end = 0, len(data)
    while at < end:
        if at + LENGTH_BYTES > end:
            raise ValueError("the last element's length is cut")
        (length,) = _LENGTH.unpack_from(data, at)
        at += LENGTH_BYTES
        if at + length > end:
            raise ValueError(f"an element of {length} bytes is cut after {end - at}")
        yield data[at : at + length]
        at += length


def texts(name: str, values: Sequence[str]) -> Tensor:
    """A BYTES tensor of one dimension, with these texts in UTF-8."""
    return Tensor(name, BYTES, (len(values),), pack(value.encode() for value in values))


def strings(tensor: Tensor) -> list[str]:
    """The texts of a BYTES tensor, flat. Raises HeadraceError (invalid_request) where an element isn't UTF-8."""
    found = []
    for index, element in enumerate(unpack(tensor.data)):
        try:
            found.append(element.decode())
        except UnicodeDecodeError:
            text = f"`{tensor.name}`: element {index} isn't UTF-8 text"
            raise HeadraceError(Reason.INVALID_REQUEST, text, param=f"inputs.{tensor.name}") from None
    return found


def not_text(tensor: Tensor) -> str | None:
    """Why a BYTES tensor, whose data isn't cut, can't be read as texts, in words for the caller, or None. Of another datatype None."""
    if tensor.datatype != BYTES or tensor.data.isascii():
        return None
    try:
        strings(tensor)
    except HeadraceError as error:
        return error.message
    return None


def unequal_rows(tensors: Sequence[Tensor]) -> str | None:
    """How tensors of one dimension or more differ in their first extent, the number of rows, in words for the caller, or None."""
    if len(rows := {tensor.shape[0] for tensor in tensors}) <= 1:
        return None
    told = ", ".join(f"`{tensor.name}` {tensor.shape[0]}" for tensor in tensors[:ROWS_TOLD_MAX])
    return f"the inputs differ in their number of rows, from {min(rows)} to {max(rows)}: {told}"


def elements(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has."""
    return math.prod(shape)


def problem(tensor: Tensor) -> str | None:
    """What is wrong with a tensor by itself, in words for the caller, or None."""
    if not 0 < len(tensor.name) <= NAME_CHARS_MAX:
        return f"a tensor's name must have 1 to {NAME_CHARS_MAX} characters"
    if tensor.datatype not in DATATYPES:
        return f"`{tensor.name}`: the datatype must be one of {', '.join(DATATYPES)}"
    if len(tensor.shape) > RANK_MAX:
        return f"`{tensor.name}`: the shape has {len(tensor.shape)} dimensions; at most {RANK_MAX} are taken"
    if any(extent < 0 for extent in tensor.shape):
        return f"`{tensor.name}`: the shape {list(tensor.shape)} has a negative dimension"
    if math.prod(extent or 1 for extent in tensor.shape) > ELEMENTS_MAX:
        return (
            f"`{tensor.name}`: the shape {list(tensor.shape)} is too large; "
            f"its dimensions may multiply to {ELEMENTS_MAX}, those that are 0 aside"
        )
    expected = elements(tensor.shape)
    if tensor.datatype == BYTES:
        return _bytes_problem(tensor, expected)
    size = ITEM_BYTES[tensor.datatype]
    if len(tensor.data) != expected * size:
        return (
            f"`{tensor.name}`: the shape {list(tensor.shape)} takes {expected} elements of {tensor.datatype} "
            f"({expected * size} bytes), and {len(tensor.data)} bytes are given"
        )
    if tensor.datatype == "BOOL" and tensor.data.translate(None, b"\x00\x01"):
        return f"`{tensor.name}`: an element of BOOL must be 0 or 1"
    return None


def _bytes_problem(tensor: Tensor, expected: int) -> str | None:
    if expected > STRINGS_MAX:
        return f"`{tensor.name}`: {expected} elements of BYTES are given; at most {STRINGS_MAX} are taken in one tensor"
    try:
        found = sum(1 for _ in islice(unpack(tensor.data), expected + 1))
    except ValueError as error:
        return f"`{tensor.name}`: {error}"
    if found != expected:
        given = "more" if found > expected else str(found)
        return f"`{tensor.name}`: the shape {list(tensor.shape)} takes {expected} elements, and {given} are given"
    return None


def misfit(tensor: Tensor, spec: TensorSpec) -> str | None:
    """Why a tensor isn't what a model takes under its name, or None."""
    if tensor.datatype != spec.datatype:
        return f"`{tensor.name}`: the model takes {spec.datatype}, not {tensor.datatype}"
    if len(tensor.shape) != len(spec.shape) or any(
        wanted not in (ANY, given) for wanted, given in zip(spec.shape, tensor.shape, strict=True)
    ):
        return f"`{tensor.name}`: the model takes the shape {list(spec.shape)}, not {list(tensor.shape)}"
    return None
