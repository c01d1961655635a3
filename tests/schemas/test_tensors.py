"""Tensors: their bytes, what is wrong with one, and what fits a signature."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import Codec, encode, encode_json
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, Tensor, TensorSpec
from schemas.tensors import (
    DATATYPES,
    ITEM_BYTES,
    STRINGS_MAX,
    elements,
    misfit,
    not_text,
    pack,
    problem,
    strings,
    texts,
    unequal_rows,
    unpack,
)
from schemas.topics import REQUEST_MAX_BYTES

REQUEST_ID = "01890a5d-ac96-774b-bcce-b302099a8057"
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    datatype, shape = draw(st.sampled_from(DATATYPES)), draw(shapes)
    count = elements(shape)
    if datatype == "BYTES":
        data = pack(draw(st.lists(st.binary(max_size=8), min_size=count, max_size=count)))
    elif datatype == "BOOL":
        data = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    else:
        size = count * ITEM_BYTES[datatype]
        data = draw(st.binary(min_size=size, max_size=size))
    return Tensor(draw(st.text(min_size=1, max_size=8)), datatype, shape, data)


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_bytes_elements_come_back(elements_given: list[bytes]) -> None:
    assert list(unpack(pack(elements_given))) == elements_given


@given(st.binary(max_size=40))
def test_whatever_bytes_come_are_elements_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert pack(unpack(data)) == data


@given(tensors())
def test_a_right_tensor_has_no_problem_and_crosses_the_log(tensor: Tensor) -> None:
    assert problem(tensor) is None
    event = InferenceRequested(REQUEST_ID, "m", inputs=(tensor,))
    assert Codec().decode(encode(event)) == event
    assert Codec().decode(encode_json(event)) == event


@given(tensors(), st.binary(min_size=1, max_size=3))
def test_a_byte_too_many_is_a_problem(tensor: Tensor, more: bytes) -> None:
    if tensor.datatype == "BYTES" or elements(tensor.shape) == 0 or len(more) % ITEM_BYTES[tensor.datatype]:
        assert problem(Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data + more)) is not None


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Tensor("", "FP32", (0,), b""), "name"),
        (Tensor("x", "FP8", (0,), b""), "datatype"),
        (Tensor("x", "FP32", (-1,), b""), "negative"),
        (Tensor("x", "FP32", (1,) * 17, b"1234"), "dimensions"),
        (Tensor("x", "UINT8", (1 << 40, 1 << 40), b""), "too large"),
        (Tensor("x", "FP32", (1 << 40, 0), b""), "too large"),
        (Tensor("x", "BYTES", (0, 3, REQUEST_MAX_BYTES // 2), b""), "too large"),
        (Tensor("x", "FP32", (1, 5), b"\0" * 28), "takes 5 elements"),
        (Tensor("x", "BOOL", (2,), b"\1\2"), "0 or 1"),
        (Tensor("x", "BYTES", (2,), pack([b"a"])), "takes 2 elements"),
        (Tensor("x", "BYTES", (1,), struct.pack("<I", 9) + b"a"), "cut"),
        (Tensor("x", "BYTES", (1,), b"\0\0"), "cut"),
        (Tensor("x", "BYTES", (1,), pack([b"a", b"b", b"c"])), "takes 1 elements, and more are given"),
        (Tensor("x", "BYTES", (0,), pack([b""])), "takes 0 elements, and more are given"),
        (Tensor("x", "BYTES", (STRINGS_MAX + 1,), b"\0" * 4 * (STRINGS_MAX + 1)), "elements of BYTES"),
    ],
)
def test_what_is_wrong_is_said(tensor: Tensor, words: str) -> None:
    found = problem(tensor)
    assert found is not None
    assert words in found


def test_the_largest_that_a_request_holds_is_no_problem() -> None:
    assert problem(Tensor("x", "UINT8", (2, REQUEST_MAX_BYTES // 2), bytes(REQUEST_MAX_BYTES))) is None
    assert problem(Tensor("x", "FP32", (REQUEST_MAX_BYTES, 0), b"")) is None


def test_counting_stops_where_there_is_one_too_many() -> None:
    """What follows the second isn't looked at: it would be told as cut."""
    found = problem(Tensor("x", "BYTES", (1,), pack([b"", b""]) + b"\0"))
    assert found is not None
    assert "more are given" in found


def test_as_many_texts_as_are_taken_are_no_problem() -> None:
    assert problem(Tensor("x", "BYTES", (256, STRINGS_MAX // 256), b"\0" * 4 * STRINGS_MAX)) is None


def test_a_specification_says_what_fits() -> None:
    spec = TensorSpec("x", "FP32", (-1, 2))
    assert misfit(Tensor("x", "FP32", (3, 2), b""), spec) is None
    assert "takes FP32" in (misfit(Tensor("x", "FP64", (3, 2), b""), spec) or "")
    assert "[-1, 2]" in (misfit(Tensor("x", "FP32", (3, 3), b""), spec) or "")
    assert "[-1, 2]" in (misfit(Tensor("x", "FP32", (3,), b""), spec) or "")


def test_texts_are_utf8() -> None:
    assert strings(texts("text", ["é", ""])) == ["é", ""]
    with pytest.raises(HeadraceError, match="element 1 isn't UTF-8"):
        strings(Tensor("text", "BYTES", (2,), pack([b"a", b"\xff"])))


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_no_text_is_what_cannot_be_read_as_texts(values: list[bytes]) -> None:
    tensor = Tensor("x", "BYTES", (len(values),), pack(values))
    if (found := not_text(tensor)) is None:
        assert strings(tensor) == [value.decode() for value in values]
    else:
        with pytest.raises(HeadraceError) as refused:
            strings(tensor)
        assert refused.value.message == found


def test_numbers_are_never_asked_to_be_text() -> None:
    assert not_text(Tensor("x", "UINT8", (1,), b"\xff")) is None


def test_rows_are_equal_or_told_by_name() -> None:
    a, b = Tensor("a", "INT8", (2, 3), bytes(6)), Tensor("b", "INT8", (3,), bytes(3))
    assert unequal_rows(()) is None
    assert unequal_rows((a, a)) is None
    assert unequal_rows((a, b)) == "the inputs differ in their number of rows, from 2 to 3: `a` 2, `b` 3"
    assert "`a` 2" in (told := unequal_rows((a, *(b,) * 255)) or "")
    assert len(told) < 200
