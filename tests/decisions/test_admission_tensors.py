"""Tensors, which a direct producer writes as it likes, among the checks of admission."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decisions.admission import AFTER_TOKENISING, BEFORE_TOKENISING
from decisions.cases import Case, Refusal, judge, prepared
from decisions.signature import BATCH_MAX, text_tensors
from decisions.verdicts import admitted
from schemas.events import (
    ModelVersionRegistered,
    Tensor,
    TensorSpec,
)
from schemas.reasons import Reason
from schemas.tensors import pack, texts
from tests.decisions.judging import refused
from tests.decisions.worlds import FakeWorld, case

VOCABULARY, CONTEXT = 30, 4
PAIRED = ModelVersionRegistered(
    "m",
    "v1",
    "onnx",
    "",
    CONTEXT,
    inputs=(TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "BYTES", (-1,))),
    outputs=(TensorSpec("y", "FP32", (-1, 2)),),
    batched=True,
)
TEXTS = replace(
    PAIRED,
    processor="text-embedding",
    inputs=(
        TensorSpec("text", "BYTES", (-1,)),
        TensorSpec("token_ids", "INT32", (-1,)),
        TensorSpec("lengths", "INT32", (-1,)),
    ),
    batched=False,
)
FOURS = replace(TEXTS, fixed_rows=4)
FILES = replace(PAIRED, processor="bytes-classification", inputs=(TensorSpec("bytes", "BYTES", (-1,)),), batched=False)
CHAT = FakeWorld().models["m"]
A, B = Tensor("a", "FP32", (2, 2), bytes(16)), texts("b", ["ä", "b"])
NO_TEXT = pack([b"a", b"\xff"])


def tensors_decided(
    version: ModelVersionRegistered, inputs: tuple[Tensor, ...], read: tuple[Tensor, ...] | None = None, **changes: Any
) -> tuple[Case, Refusal | None]:
    """What the shell does with tensors: between the halves of the list `read` is what the tokenizer makes of texts."""
    world = FakeWorld(models={"m": version})
    found, refusal = judge(case(messages=None, inputs=inputs, **changes), world, BEFORE_TOKENISING)
    if refusal is not None:
        return found, refusal
    return judge(prepared(found, inputs if read is None else read, VOCABULARY), world, AFTER_TOKENISING)


@pytest.mark.parametrize(
    ("version", "inputs", "read"),
    [
        (PAIRED, (B, A), None),
        (TEXTS, text_tensors([[0, 29], [1] * CONTEXT]), None),
        (TEXTS, (texts("text", ["ä"]),), text_tensors([[1, 2]])),
        (FOURS, text_tensors([[1]] * 8), None),
        (FILES, (Tensor("bytes", "BYTES", (2,), NO_TEXT),), None),
    ],
)
def test_tensors_that_fit_are_admitted_as_the_worker_reads_them(
    version: ModelVersionRegistered, inputs: tuple[Tensor, ...], read: tuple[Tensor, ...] | None
) -> None:
    found, refusal = tensors_decided(version, inputs, read)
    assert refusal is None
    assert [decision.check for decision in found.decisions][3:8] == [
        "route",
        "signature",
        "tokenise",
        "vocabulary",
        "context",
    ]
    assert admitted(found)[0].inputs == (inputs if read is None else read)


@pytest.mark.parametrize(
    ("version", "inputs", "param", "words"),
    [
        (PAIRED, (A, replace(B, name="c")), "inputs[1].name", "no input `c`; it has a, b"),
        (PAIRED, (A,), "inputs", "the input `b` is missing"),
        (PAIRED, (replace(A, datatype="INT32"), B), "inputs[0]", "`a`: the model takes FP32, not INT32"),
        (PAIRED, (A, Tensor("b", "UINT8", (2,), bytes(2))), "inputs[1]", "`b`: the model takes BYTES, not UINT8"),
        (PAIRED, (replace(A, shape=(4, 1)), B), "inputs[0]", "`a`: the model takes the shape [-1, 2], not [4, 1]"),
        (PAIRED, (replace(A, shape=(4,)), B), "inputs[0]", "`a`: the model takes the shape [-1, 2], not [4]"),
        (PAIRED, (replace(A, shape=(1, 2), data=bytes(8)), B), "inputs", "from 1 to 2: `a` 1, `b` 2"),
        (PAIRED, (A, replace(B, data=NO_TEXT)), "inputs[1]", "`b`: element 1 isn't UTF-8 text"),
        (TEXTS, (Tensor("text", "BYTES", (2,), NO_TEXT),), "inputs[0]", "`text`: element 1 isn't UTF-8 text"),
        (TEXTS, (texts("text", []),), "inputs", "0 items are given"),
        (TEXTS, (texts("text", ["a"] * (BATCH_MAX + 1)),), "inputs", "items are given; from 1 to"),
        (TEXTS, text_tensors([[1], []]), "inputs", "must be at least 1 each"),
        (FOURS, text_tensors([[1]] * 3), "inputs", "4 items at a time, and 3 are given"),
        (FILES, (texts("text", ["a"]),), "inputs[0].name", "no input `text`; it has bytes"),
        (CHAT, (A,), "inputs", "takes messages or a prompt, not tensors"),
    ],
)
def test_tensors_that_the_version_does_not_take_are_refused_before_their_texts_are_read(
    version: ModelVersionRegistered, inputs: tuple[Tensor, ...], param: str, words: str
) -> None:
    found, refusal = tensors_decided(version, inputs)
    assert refusal is not None
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, param)
    assert words in refusal.message
    assert (found.decisions[-1].check, found.decisions[-1].outcome) == ("signature", "refused")


@pytest.mark.parametrize("inputs", [(), (replace(A, data=bytes(12)), B), (A, replace(B, data=b"\xff\0\0\0a")), (A, A)])
def test_tensors_that_no_version_takes_are_refused_whatever_the_model(inputs: tuple[Tensor, ...]) -> None:
    found, refusal = tensors_decided(PAIRED, inputs)
    assert refusal is not None
    assert refusal.reason is Reason.INVALID_REQUEST
    assert found.decisions[-1].check == "validation"


def test_an_output_or_a_wish_that_the_version_does_not_have_is_refused() -> None:
    for changes, param in (
        ({"outputs": ("z",)}, "outputs[0].name"),
        ({"parameters": {"dimensions": "0"}}, "parameters.dimensions"),
    ):
        _, refusal = tensors_decided(TEXTS, text_tensors([[1]]), **changes)
        assert refusal is not None
        assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, param)


def test_a_tensor_model_takes_no_prompt() -> None:
    refusal = refused(case(), FakeWorld(models={"m": PAIRED}))
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "model")
    assert "takes tensors (a, b), not a prompt" in refusal.message


@pytest.mark.parametrize("unknown", [VOCABULARY, -1, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_refused_by_its_id(unknown: int) -> None:
    found, refusal = tensors_decided(TEXTS, text_tensors([[1, 2], [3, unknown]]))
    assert refusal is not None
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "inputs")
    assert refusal.message == f"the model has no token {unknown}; its ids run from 0 to 29"
    assert found.decisions[-1].check == "vocabulary"


@pytest.mark.parametrize(
    ("lengths", "reason", "words"),
    [
        ((2, 0), Reason.INVALID_REQUEST, "the text at 1 has no tokens"),
        ((1, 2, CONTEXT + 1), Reason.CONTEXT_LENGTH_EXCEEDED, "length is 4 tokens, and the text at 2 has 5"),
    ],
)
def test_a_text_must_have_tokens_and_fit_the_context(lengths: tuple[int, ...], reason: Reason, words: str) -> None:
    given = texts("text", ["a"] * len(lengths))
    found, refusal = tensors_decided(TEXTS, (given,), text_tensors([[1] * length for length in lengths]))
    assert refusal is not None
    assert (refusal.reason, refusal.param) == (reason, "inputs")
    assert words in refusal.message
    assert found.decisions[-1].check == "context"
