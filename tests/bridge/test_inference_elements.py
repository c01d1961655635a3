"""Tensors as JSON has them: what goes there comes back, and what isn't of the datatype is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.inference.elements import FLOATS, NUMPY, from_json, to_json
from bridge.inference.rest_requests import read_id, read_json, scalars
from schemas.errors import HeadraceError
from schemas.parts import Tensor
from schemas.tensors import DATATYPES, ITEM_BYTES, elements, pack, problem

JSON_TYPES = tuple(kind for kind in DATATYPES if kind != "BF16")
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, kinds: tuple[str, ...] = JSON_TYPES) -> Tensor:
    """Any tensor, every bit pattern of it included."""
    datatype, shape = draw(st.sampled_from(kinds)), draw(SHAPES)
    count = elements(shape)
    if datatype == "BYTES":
        data = pack(draw(st.lists(st.binary(max_size=6), min_size=count, max_size=count)))
    elif datatype == "BOOL":
        data = bytes(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    else:
        size = count * ITEM_BYTES[datatype]
        data = draw(st.binary(min_size=size, max_size=size))
    return Tensor("x", datatype, shape, data)


def travelled(tensor: Tensor) -> Tensor:
    """A tensor that was an output, and is now an input."""
    data, as_base64 = to_json(tensor)
    body = read_json(orjson.dumps({"data": data}, option=orjson.OPT_SERIALIZE_NUMPY))
    found = from_json("x", tensor.datatype, tensor.shape, body["data"], as_base64=as_base64)
    return Tensor("x", tensor.datatype, tensor.shape, found)


@given(tensors())
def test_what_is_told_in_json_comes_back(tensor: Tensor) -> None:
    found = travelled(tensor)
    assert problem(found) is None
    if tensor.datatype in FLOATS:
        kind = NUMPY[tensor.datatype]
        np.testing.assert_array_equal(np.frombuffer(found.data, kind), np.frombuffer(tensor.data, kind))
    else:
        assert found.data == tensor.data


@given(tensors(), st.data())
def test_data_may_be_nested_as_the_shape_says(tensor: Tensor, data: st.DataObject) -> None:
    flat, as_base64 = to_json(tensor, as_base64=tensor.datatype == "BYTES")
    nested = np.array(list(flat), dtype=object).reshape(tensor.shape).tolist()
    if not isinstance(nested, list):
        nested = [nested]
    plain = orjson.loads(orjson.dumps(nested, option=orjson.OPT_SERIALIZE_NUMPY, default=lambda value: value.item()))
    if elements(tensor.shape):
        assert from_json("x", tensor.datatype, tensor.shape, plain, as_base64=as_base64) == travelled(tensor).data
    if len(tensor.shape) > 1 and elements(tensor.shape) and len(set(tensor.shape)) > 1:
        wrong = data.draw(st.permutations(tensor.shape).filter(lambda shape: tuple(shape) != tensor.shape))
        with pytest.raises(HeadraceError):
            from_json("x", tensor.datatype, tuple(wrong), plain, as_base64=as_base64)


@pytest.mark.parametrize("datatype", FLOATS)
def test_what_json_cannot_say_is_a_word(datatype: str) -> None:
    values = np.array([math.nan, math.inf, -math.inf, 0.5, -0.0], NUMPY[datatype])
    told, _ = to_json(Tensor("y", datatype, (5,), values.tobytes()))
    assert told == ["NaN", "Infinity", "-Infinity", 0.5, 0.0]
    assert math.copysign(1, told[4]) == -1
    np.testing.assert_array_equal(np.array(told, NUMPY[datatype]), values)  # as both clients read it
    for written in (
        b'["NaN","Infinity","-Infinity",0.5,-0.0]',
        b"[NaN,Infinity,-Infinity,0.5,-0.0]",
        b"[null,Infinity,-Infinity,0.5,-0.0]",
    ):
        body = read_json(b'{"data":' + written + b"}")
        np.testing.assert_array_equal(
            np.frombuffer(from_json("x", datatype, (5,), body["data"]), NUMPY[datatype]), values
        )


@pytest.mark.parametrize("beside", [b'"NaN"', b"NaN", b"1"])
def test_a_number_that_no_double_holds_is_not_infinity(beside: bytes) -> None:
    for number in (b"1e400", b"-1e400"):
        with pytest.raises(HeadraceError):
            read_json(b'{"data":[' + number + b"," + beside + b"]}")


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        *((kind, bad) for kind in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64") for bad in (1.0, True, "1", None, [1])),
        ("INT8", 128), ("INT8", -129), ("UINT8", 256), ("UINT8", -1), ("INT16", 1 << 15), ("UINT16", 1 << 16), ("INT32", 1 << 31),
        ("UINT32", 1 << 32), ("INT64", 1 << 63), ("UINT64", 1 << 64), ("UINT64", -1), ("FP16", 65_520), ("FP32", 3.5e38), ("FP64", 10**400),
        ("FP32", True), ("FP32", "1"), ("FP32", "nan"), ("FP32", {}), ("BOOL", 1), ("BOOL", "true"), ("BOOL", None), ("BYTES", 1), ("BYTES", None), ("BF16", 1.0),
    ],
)  # fmt: skip
def test_what_is_not_of_the_datatype_is_refused(datatype: str, value: Any) -> None:
    with pytest.raises(HeadraceError):
        from_json("inputs[0]", datatype, (1,), [value])


@pytest.mark.parametrize(
    ("datatype", "number", "told"),
    [
        ("UINT64", "18446744073709551616", "out of the range of UINT64, 0 to 18446744073709551615"),
        ("UINT64", "-9223372036854775809", "out of the range of UINT64"),
        ("INT64", "9223372036854775808", "out of the range of INT64, -9223372036854775808 to 9223372036854775807"),
        ("INT64", "-9223372036854775809", "out of the range of INT64"),
        ("INT8", "1" * 30, "out of the range of INT8, -128 to 127"),
        ("UINT64", "1.5", "must be a whole number, as UINT64 is"),
        ("UINT64", "9223372036854775808.0", "must be a whole number, as UINT64 is"),
        ("INT32", "NaN", "must be a whole number, as INT32 is"),
        ("INT32", "Infinity", "must be a whole number, as INT32 is"),
    ],
)
@pytest.mark.parametrize("beside", ["", ', "other": NaN'], ids=["json", "with words"])
def test_a_whole_number_out_of_range_is_told_so_however_long_it_is(
    datatype: str, number: str, told: str, beside: str
) -> None:
    body = read_json(f'{{"data": [1, {number}]{beside}}}'.encode())
    with pytest.raises(HeadraceError) as refused:
        from_json("inputs[0]", datatype, (2,), body["data"])
    assert refused.value.message.startswith("inputs[0]: element 1 ")
    assert told in refused.value.message


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_word_without_quotes_is_a_number_and_no_text(word: str) -> None:
    body = read_json(f'{{"data": [{word}], "id": {word}, "parameters": {{"user": {word}}}}}'.encode())
    for datatype in ("BYTES", "BOOL", "INT32"):
        with pytest.raises(HeadraceError, match="element 0 must be"):
            from_json("x", datatype, (1,), body["data"])
    with pytest.raises(HeadraceError, match="id must be a string"):
        read_id(body["id"])
    with pytest.raises(HeadraceError, match=r"parameters\.user must be"):
        scalars(body["parameters"], "parameters")
    assert from_json("x", "BYTES", (1,), [word]) == pack([word.encode()])


@pytest.mark.parametrize("data", [[], [1], [1, 2, 3], [[1, 2]], [[1], [2]], [1, [2]], [[1], 2], {"0": 1}, "ab", None])
def test_another_count_than_the_shape_is_refused(data: Any) -> None:
    if data == [[1], [2]]:
        assert from_json("x", "INT8", (2, 1), data) == b"\x01\x02"
    with pytest.raises(HeadraceError):
        from_json("x", "INT8", (2,), data)


def test_text_is_utf8_and_other_bytes_are_base64() -> None:
    assert to_json(Tensor("y", "BYTES", (2,), pack([b"\xc3\xa4", b""]))) == (["ä", ""], False)
    assert to_json(Tensor("y", "BYTES", (2,), pack([b"\xff", b"a"]))) == (["/w==", "YQ=="], True)
    assert to_json(Tensor("y", "BYTES", (1,), pack([b"a"])), as_base64=True) == (["YQ=="], True)
    assert from_json("x", "BYTES", (2,), ["/w==", "YQ=="], as_base64=True) == pack([b"\xff", b"a"])
    for wrong in ("/w=", "ä", "/w==\n"):
        with pytest.raises(HeadraceError):
            from_json("x", "BYTES", (1,), [wrong], as_base64=True)
