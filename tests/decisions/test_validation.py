from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.validation import LOGIT_BIAS_MAX, MESSAGES_MAX, problem, sampling_problem, vocabulary_problem
from schemas.events import InferenceRequested, Message, Sampling, Tensor

ID = "01900000-0000-7000-8000-000000000000"
LIMIT = 1_000
INPUTS = (Tensor("x", "UINT8", (1,), b"a"),)
GOOD = InferenceRequested(ID, "m", prompt="hello")


def param(request: InferenceRequested) -> str | None:
    found = problem(request, LIMIT)
    return None if found is None else found.param


def test_a_plain_request_has_no_fault() -> None:
    assert problem(GOOD, LIMIT) is None
    assert param(replace(GOOD, prompt=None, messages=(Message("user", "hi", name="ann"),))) is None
    assert param(replace(GOOD, prompt=None, prompt_token_ids=(1,))) is None
    assert param(replace(GOOD, timeout_ms=1, user="u")) is None
    assert param(replace(GOOD, prompt=None, inputs=INPUTS, outputs=("y",), parameters={"top_k": "1"})) is None


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "01900000-0000-4000-8000-000000000000"}, "request_id"),
        ({"request_id": ID.upper().replace("0", "A", 1)}, "request_id"),
        ({"model": ""}, "model"),
        ({"model": "m" * 101}, "model"),
        ({"user": "u" * 513}, "user"),
        ({"prompt": None}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": (1,)}, "prompt_token_ids"),
        ({"messages": (Message("user", "hi"),)}, "prompt"),
        ({"prompt": None, "prompt_token_ids": ()}, "prompt_token_ids"),
        ({"prompt": None, "messages": ()}, "messages"),
        ({"prompt": None, "messages": (Message("user", "x"),) * (MESSAGES_MAX + 1)}, "messages"),
        ({"prompt": None, "messages": (Message("user", "x"), Message("robot", "x"))}, "messages[1].role"),
        ({"prompt": None, "messages": (Message("user", "x", name=""),)}, "messages[0].name"),
        ({"prompt": None, "inputs": INPUTS, "sampling": Sampling(n=2)}, "sampling.n"),
        ({"prompt": None, "inputs": INPUTS, "outputs": ("y" * 257,)}, "outputs[0]"),
        ({"outputs": ("y",)}, "outputs"),
        ({"parameters": {"top_k": "1"}}, "parameters"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"timeout_ms": -1}, "timeout_ms"),
        ({"timeout_ms": 86_400_001}, "timeout_ms"),
    ],
)
def test_a_field_at_fault_is_named(changes: dict[str, Any], at: str) -> None:
    assert param(replace(GOOD, **changes)) == at


@pytest.mark.parametrize(
    ("text", "fits"), [("a" * LIMIT, True), ("a" * (LIMIT + 1), False), ("é" * 501, False), ("é" * 500, True)]
)
def test_content_is_bounded_in_bytes(text: str, fits: bool) -> None:
    for request in (replace(GOOD, prompt=text), replace(GOOD, prompt=None, messages=(Message("user", text),))):
        found = problem(request, LIMIT)
        assert (found is None) == fits
        assert found is None or found.too_large


FAULTS: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [None, 1, 1 << 62], [0, -1]),
    ("min_tokens", [0, 5], [-1]),
    ("temperature", [0.0, 2.0], [-0.01, 2.01, math.nan, math.inf, -math.inf]),
    ("top_p", [0.01, 1.0], [0.0, 1.01, math.nan]),
    ("top_k", [0, 1, 50_000], [-1, 1 << 31]),
    ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
    ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
    ("repetition_penalty", [0.01, 2.0], [0.0, -1.0, math.nan, math.inf]),
    ("seed", [None, 0, -(1 << 63), (1 << 63) - 1], [1 << 63]),
    ("n", [1, 8], [0, -1, 9]),
    ("logprobs", [None, 0, 20], [-1, 21]),
]


@pytest.mark.parametrize(("name", "good", "bad"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_each_parameter_has_a_range(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert sampling_problem(replace(Sampling(), **{name: value})) is None, value
    for value in bad:
        found = sampling_problem(replace(Sampling(), **{name: value}))
        assert found is not None and found.param == f"sampling.{name}", value
        assert name in found.message


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert sampling_problem(Sampling(max_tokens=3, min_tokens=3)) is None
    found = sampling_problem(Sampling(max_tokens=3, min_tokens=4))
    assert found is not None and found.param == "sampling.min_tokens"


@pytest.mark.parametrize(
    ("sampling", "at"),
    [
        (Sampling(stop=("a",) * 17), "sampling.stop"),
        (Sampling(stop=("a", "")), "sampling.stop[1]"),
        (Sampling(stop=("a" * 257,)), "sampling.stop[0]"),
        (Sampling(stop_token_ids=(1,) * 65), "sampling.stop_token_ids"),
        (Sampling(logit_bias={str(i): 0.0 for i in range(LOGIT_BIAS_MAX + 1)}), "sampling.logit_bias"),
        (Sampling(logit_bias={"x": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={" 1": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"1_0": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"٣": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"1" * 5_000: 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"5": 100.1}), "sampling.logit_bias.5"),
        (Sampling(logit_bias={"5": math.nan}), "sampling.logit_bias.5"),
        (Sampling(logit_bias={"5": -math.inf}), "sampling.logit_bias.5"),
    ],
)
def test_lists_and_biases_are_bounded(sampling: Sampling, at: str) -> None:
    found = sampling_problem(sampling)
    assert found is not None and found.param == at


@pytest.mark.parametrize(
    ("sampling", "ids", "at"),
    [
        (Sampling(), (0, 256), None),
        (Sampling(logit_bias={"256": 5.0, "0": -100.0}, stop_token_ids=(0, 256)), None, None),
        (Sampling(), (1, -3), "prompt_token_ids[1]"),
        (Sampling(), (257,), "prompt_token_ids[0]"),
        (Sampling(stop_token_ids=(2147483647,)), None, "sampling.stop_token_ids[0]"),
        (Sampling(stop_token_ids=(1, -1)), None, "sampling.stop_token_ids[1]"),
        (Sampling(logit_bias={"99999999": 5.0}), None, "sampling.logit_bias.99999999"),
        (Sampling(logit_bias={"-1": 5.0}), None, "sampling.logit_bias.-1"),
    ],
)
def test_token_ids_belong_to_the_vocabulary(sampling: Sampling, ids: tuple[int, ...] | None, at: str | None) -> None:
    assert sampling_problem(sampling) is None
    found = vocabulary_problem(sampling, ids, 257)
    assert (found.param if found else None) == at


@given(
    st.builds(
        Sampling,
        max_tokens=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        min_tokens=st.integers(-5, 20),
        temperature=st.floats(),
        top_p=st.floats(),
        min_p=st.floats(),
        repetition_penalty=st.floats(),
        logit_bias=st.dictionaries(st.text(max_size=6), st.floats(), max_size=3),
    )
)
def test_nothing_that_passes_is_out_of_range(sampling: Sampling) -> None:
    found = sampling_problem(sampling)
    if found is None:
        assert 0 <= sampling.temperature <= 2 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
        assert all(-100 <= bias <= 100 for bias in sampling.logit_bias.values())
        assert all(str(int(token_id)) == token_id for token_id in sampling.logit_bias)
    else:
        assert found.param.startswith("sampling.")
