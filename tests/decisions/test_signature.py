"""What a version takes of a request's tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.batching import PARTS_MAX
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
PAIRED = ModelVersionRegistered(
    "paired",
    "1",
    "onnx",
    "/m",
    1,
    inputs=(TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "FP32", (-1, 3))),
    outputs=(TensorSpec("sum", "FP32", (-1, 3)),),
    batched=True,
)
NAMED = replace(PAIRED, inputs=(TensorSpec("a", "BYTES", (-1,)), TensorSpec("b", "BYTES", (-1, 1))))
FOURS = replace(EMBEDDING, fixed_rows=4)
FILES = ModelVersionRegistered(
    "magika",
    "1",
    "onnx",
    "/m",
    1,
    processor="bytes-classification",
    inputs=(TensorSpec("bytes", "BYTES", (-1,)),),
    outputs=(TensorSpec("label", "BYTES", (-1, -1)), TensorSpec("score", "FP32", (-1, -1))),
)
CHAT = ModelVersionRegistered("chat", "1", "vllm", "/m", 256)
X = Tensor("x", "FP32", (1, 5), b"\0" * 20)
Y = Tensor("y", "INT64", (), b"\0" * 8)
JUNK = pack([b"a", b"\xff"])


def rows(name: str, count: int) -> Tensor:
    """So many rows of three zeros."""
    return Tensor(name, "FP32", (count, 3), b"\0" * 12 * count)


def test_what_the_signature_says_is_taken() -> None:
    assert problem(RAW, (X, Y), (), {}) is None
    assert problem(RAW, (Y, X), ("z",), {"anything": "else"}) is None
    assert problem(EMBEDDING, (texts("text", ["a", "b"]),), (), {"dimensions": "8"}) is None
    assert problem(EMBEDDING, text_tensors([[1, 2], [3]]), (), {}) is None
    assert problem(NAMED, (texts("a", ["é" * 200]), Tensor("b", "BYTES", (1, 1), pack([b""]))), (), {}) is None


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
        (PAIRED, (rows("b", 3), rows("a", 2)), (), {}, "inputs", "from 2 to 3: `b` 3, `a` 2"),
        (PAIRED, (rows("a", 0), rows("b", 1)), (), {}, "inputs", "from 0 to 1"),
        (FOURS, (texts("text", ["a"] * 6),), (), {}, "inputs", "4 items at a time, and 6 are given"),
        (FOURS, text_tensors([[1, 2], [3], [4]]), (), {}, "inputs", "4 items at a time, and 3 are given"),
        (
            replace(FILES, fixed_rows=2),
            (texts("bytes", ["a"]),),
            (),
            {},
            "inputs",
            "2 items at a time, and 1 are given",
        ),
        (
            NAMED,
            (texts("a", ["a"]), Tensor("b", "BYTES", (2, 1), JUNK)),
            (),
            {},
            "inputs[1]",
            "`b`: element 1 isn't UTF-8",
        ),
        (EMBEDDING, (Tensor("text", "BYTES", (2,), JUNK),), (), {}, "inputs[0]", "`text`: element 1 isn't UTF-8 text"),
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


@pytest.mark.parametrize(
    ("engine_args", "most"),
    [("{}", 32 * PARTS_MAX), ('{"max_batch_size": 1, "instances": 2}', PARTS_MAX), ('{"max_batch_size": 3}', 3 * PARTS_MAX), ("?", 32 * PARTS_MAX), ("[]", 32 * PARTS_MAX), ('{"max_batch_size": "9"}', 32 * PARTS_MAX)],
)  # fmt: skip
def test_more_rows_than_can_be_cut_into_parts_are_refused(engine_args: str, most: int) -> None:
    version = replace(PAIRED, engine_args=engine_args)
    assert problem(version, (rows("a", most), rows("b", most)), (), {}) is None
    found = problem(version, (rows("a", most + 1), rows("b", most + 1)), (), {})
    assert found is not None
    assert (
        found.message == f"{most + 1} rows are given; at most {most} are taken at once: send the rest in other requests"
    )
    unbatched = replace(version, batched=False)
    assert problem(unbatched, (rows("a", most + 1), rows("b", most + 1)), (), {}) is None, "it runs as it is"


@pytest.mark.parametrize("count", [0, 1, 7])
def test_as_many_rows_in_each_input_are_taken(count: int) -> None:
    assert problem(PAIRED, (rows("a", count), rows("b", count)), (), {}) is None


def test_first_dimensions_that_count_no_rows_may_differ() -> None:
    """Two dimensions with names of their own, or a version registered when nothing was known of rows."""
    assert problem(replace(PAIRED, batched=False), (rows("a", 2), rows("b", 3)), (), {}) is None


def test_a_fixed_number_of_rows_is_the_shapes_where_there_is_no_processor() -> None:
    fixed = (TensorSpec("a", "FP32", (4, 3)), TensorSpec("b", "FP32", (4, 3)))
    version = replace(PAIRED, batched=False, fixed_rows=4, inputs=fixed)
    assert problem(version, (rows("a", 4), rows("b", 4)), (), {}) is None
    assert problem(version, (rows("a", 4), rows("b", 8)), (), {}) is not None


@pytest.mark.parametrize("count", [4, 8])
def test_items_are_taken_in_multiples_of_what_a_file_takes_at_once(count: int) -> None:
    assert problem(FOURS, (texts("text", ["a"] * count),), (), {}) is None
    assert problem(FOURS, text_tensors([[1]] * count), (), {}) is None


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


def test_bytes_are_rows_and_may_be_any() -> None:
    assert problem(FILES, (Tensor("bytes", "BYTES", (2,), JUNK),), (), {"top_k": "3"}) is None
