"""What a version takes of a request's tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.signature import (
    BATCH_MAX,
    LENGTHS,
    TOKEN_IDS,
    input_problem,
    int32,
    problem,
    text_lengths,
    text_tensors,
    unfit,
    unknown_token,
)
from schemas.events import InferenceRequested, ModelVersionRegistered, Tensor, TensorSpec
from schemas.tensors import pack, texts

RAW = ModelVersionRegistered(
    "raw",
    "1",
    "onnx",
    "/m",
    1,
    inputs=(TensorSpec("x", "FP32", (-1, 5)), TensorSpec("y", "INT64", ())),
    outputs=(TensorSpec("z", "FP32", (-1, 5)),),
)
EMBEDDING = ModelVersionRegistered(
    "minilm",
    "1",
    "onnx",
    "/m",
    256,
    processor="text-embedding",
    inputs=(
        TensorSpec("text", "BYTES", (-1,)),
        TensorSpec(TOKEN_IDS, "INT32", (-1,)),
        TensorSpec(LENGTHS, "INT32", (-1,)),
    ),
    outputs=(TensorSpec("embedding", "FP32", (-1, 384)),),
)
CHAT = ModelVersionRegistered("chat", "1", "vllm", "/m", 256)
X = Tensor("x", "FP32", (1, 5), b"\0" * 20)
Y = Tensor("y", "INT64", (), b"\0" * 8)


def test_what_the_signature_says_is_taken() -> None:
    assert problem(RAW, (X, Y), (), {}) is None
    assert problem(RAW, (Y, X), ("z",), {"anything": "else"}) is None
    assert problem(EMBEDDING, (texts("text", ["a", "b"]),), (), {"dimensions": "8"}) is None
    assert problem(EMBEDDING, text_tensors([[1, 2], [3]]), (), {}) is None


@pytest.mark.parametrize(
    ("version", "inputs", "outputs", "parameters", "param", "words"),
    [
        (RAW, (X,), (), {}, "inputs", "`y` is missing"),
        (RAW, (X, Y, Tensor("w", "FP32", (), b"\0" * 4)), (), {}, "inputs[2].name", "no input `w`; it has x, y"),
        (RAW, (Tensor("x", "FP64", (1, 5), b"\0" * 40), Y), (), {}, "inputs[0]", "takes FP32"),
        (RAW, (Tensor("x", "FP32", (1, 4), b"\0" * 16), Y), (), {}, "inputs[0]", "takes the shape"),
        (RAW, (X, Y), ("w",), {}, "outputs[0].name", "no output `w`; it has z"),
        (CHAT, (X,), (), {}, "inputs", "not tensors"),
        (EMBEDDING, (texts("text", []),), (), {}, "inputs", "0 items"),
        (EMBEDDING, (texts("text", [""] * (BATCH_MAX + 1)),), (), {}, "inputs", "items"),
        (EMBEDDING, (texts("text", ["a"]), *text_tensors([[1]])), (), {}, "inputs", "not both"),
        (EMBEDDING, text_tensors([[1]])[:1], (), {}, "inputs", "must be given"),
        (EMBEDDING, (text_tensors([[1]])[0], text_tensors([[1, 2]])[1]), (), {}, "inputs", "add up to 2"),
        (EMBEDDING, text_tensors([[1], []]), (), {}, "inputs", "at least 1"),
        (EMBEDDING, (texts("text", ["a"]),), (), {"dimensions": "0"}, "parameters.dimensions", "whole number"),
        (EMBEDDING, (texts("text", ["a"]),), (), {"dimensions": "٣"}, "parameters.dimensions", "whole number"),
    ],
)
def test_what_it_does_not_say_is_refused_by_name(
    version: ModelVersionRegistered,
    inputs: tuple[Tensor, ...],
    outputs: tuple[str, ...],
    parameters: dict[str, str],
    param: str,
    words: str,
) -> None:
    found = problem(version, inputs, outputs, parameters)
    assert found is not None
    assert (found.param, words in found.message) == (param, True), found


def test_seven_values_are_no_shape_of_five() -> None:
    found = input_problem((Tensor("x", "FP32", (1, 5), b"\0" * 28),), (), {})
    assert found is not None
    assert found.param == "inputs[0]"


@pytest.mark.parametrize(
    ("inputs", "outputs", "parameters"),
    [((), (), {}), ((X, X), (), {}), ((X,), ("a", "a"), {}), ((X,), (), {"a": "b" * 2_000})],
)
def test_what_no_model_takes_is_refused(
    inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: dict[str, str]
) -> None:
    assert input_problem(inputs, outputs, parameters) is not None


def test_a_prompt_is_no_tensor() -> None:
    assert unfit(InferenceRequested("r", "minilm", prompt="a"), EMBEDDING) is not None
    assert unfit(InferenceRequested("r", "chat", inputs=(X,)), CHAT) is not None
    assert unfit(InferenceRequested("r", "chat", prompt="a"), CHAT) is None


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=9))
def test_texts_are_ids_and_lengths(ids: list[list[int]]) -> None:
    ids_tensor, lengths = text_tensors(ids)
    assert int32(ids_tensor.data) == tuple(each for text in ids for each in text)
    assert text_lengths("text-embedding", (ids_tensor, lengths)) == tuple(map(len, ids))
    assert text_lengths("", (ids_tensor, lengths)) == ()
    assert problem(EMBEDDING, (ids_tensor, lengths), (), {}) is None
    assert unknown_token("text-embedding", (ids_tensor, lengths), 100) is None
    assert unknown_token("text-embedding", (ids_tensor, lengths), max(map(max, ids))) == max(map(max, ids))


def test_bytes_are_rows() -> None:
    version = ModelVersionRegistered(
        "magika",
        "1",
        "onnx",
        "/m",
        1,
        processor="bytes-classification",
        inputs=(TensorSpec("bytes", "BYTES", (-1,)),),
        outputs=(TensorSpec("label", "BYTES", (-1, -1)), TensorSpec("score", "FP32", (-1, -1))),
    )
    assert problem(version, (Tensor("bytes", "BYTES", (1,), pack([b"\xff"])),), (), {"top_k": "3"}) is None
