"""How an answer from the cache is told, and which are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.cache import (
    BY_CACHE,
    CHUNK_TOKENS,
    CHUNKS_MAX,
    ENTRY_BYTES_MAX,
    chunks,
    may_be_kept,
    stream,
)
from decisions.endings import Facts, answered, facts
from decisions.stream import NEW, StreamState, fold
from infra.together import BATCH_BYTES_MAX
from schemas.codec import encode, encode_json
from schemas.events import (
    Alternative,
    Attempt,
    ChoiceAnswer,
    ChoiceEnd,
    GenerationStarted,
    InferenceAnswered,
    InferenceCompleted,
    Rates,
    Timings,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from tests.decisions.caching import WORK, answer
from tests.decisions.worlds import ID


def folded(events: list[Any]) -> tuple[StreamState, Facts, list[TokensGenerated]]:
    state, known, counted = NEW, Facts(), []
    for event in events:
        state, counts = fold(state, event)
        assert counts
        known = facts(known, event)
        if isinstance(event, TokensGenerated):
            counted.append(event)
    return state, known, counted


@given(st.integers(0, 400), st.text(max_size=60), st.integers(1, 3), st.booleans())
def test_an_answer_told_again_is_the_same_answer(count: int, text: str, n: int, scored: bool) -> None:
    logprobs = tuple(TokenLogprob(i, b"x", -1.0) for i in range(count)) if scored and count else None
    choices = tuple(ChoiceAnswer(i, tuple(range(count)), text, "stop", "end", logprobs) for i in range(n))
    kept = answer(choices=choices, usage=Usage(2, n * count, 1))
    events = stream(kept, replace(WORK, rates=Rates()), 1_234)
    state, known, counted = folded(events)
    last = events[-1]
    assert isinstance(last, InferenceCompleted)
    whole = answered(state, known, last, counted)
    assert whole == replace(kept, request_id=ID, tier="interactive", cache_key="")
    (begun,) = [event for event in events if isinstance(event, GenerationStarted)]
    assert (begun.cache_age_ms, begun.cache_key, begun.worker_id, begun.rates) == (1_234, "", BY_CACHE, Rates())


@given(st.integers(0, 5_000), st.text(max_size=200))
def test_a_long_answer_is_told_in_chunks_that_add_up(count: int, text: str) -> None:
    whole = TokensGenerated(ID, 0, Attempt(0, 1), 5, tuple(range(count)), text)
    found = list(chunks(whole))
    assert "".join(chunk.text for chunk in found) == text
    assert tuple(token for chunk in found for token in chunk.token_ids) == whole.token_ids
    assert [chunk.first for chunk in found] == [5 + sum(len(c.token_ids) for c in found[:i]) for i in range(len(found))]
    assert len(found) <= CHUNKS_MAX
    assert len(found) == 1 or count > CHUNK_TOKENS


def test_a_hit_is_not_kept_anew() -> None:
    state, known, counted = folded(stream(answer(), WORK, 0))
    ending = InferenceCompleted(
        ID, "acme", "m", "v1", "interactive", Attempt(0, 1), (ChoiceEnd(0, 5, "stop"),), Usage(2, 5), Timings(), ""
    )
    assert not may_be_kept(answered(state, known, ending, counted), 100)


def test_what_failed_or_is_too_large_or_has_no_name_is_not_kept() -> None:
    assert may_be_kept(answer(), ENTRY_BYTES_MAX)
    assert not may_be_kept(answer(), ENTRY_BYTES_MAX + 1)
    assert not may_be_kept(answer(cache_key=""), 100)
    assert not may_be_kept(answer(error_reason="engine_error"), 100)


def _largest(choice: ChoiceAnswer, n: int) -> InferenceAnswered:
    """An answer that is as large as may be kept, made of many of the smallest tokens."""
    each = len(encode(answer(choices=(choice,)))) / 1_000
    count = int(ENTRY_BYTES_MAX / n / each)
    times = -(-count // 1_000)
    return answer(
        choices=tuple(
            ChoiceAnswer(
                i,
                (choice.token_ids * times)[:count],
                (choice.text * times)[:count],
                "stop",
                logprobs=None if choice.logprobs is None else (choice.logprobs * times)[:count],
            )
            for i in range(n)
        )
    )


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize(
    "choice",
    [
        ChoiceAnswer(0, (1,) * 1_000, "\0" * 1_000, "stop"),
        ChoiceAnswer(0, (99_999,) * 1_000, "語" * 1_000, "stop"),
        ChoiceAnswer(0, (1,) * 1_000, "", "stop", logprobs=(TokenLogprob(1, b"", -1.2345678901234567e-100),) * 1_000),
        ChoiceAnswer(
            0,
            (1,) * 1_000,
            "\0" * 1_000,
            "stop",
            logprobs=(TokenLogprob(1, b"", -0.1234567890123456, (Alternative(1, b"", -1.2345678901234567e-100),) * 20),)
            * 1_000,
        ),
    ],
)
def test_the_largest_that_is_kept_is_one_batch_in_any_encoding(choice: ChoiceAnswer, n: int) -> None:
    kept = _largest(choice, n)
    assert len(encode(kept)) > ENTRY_BYTES_MAX * 0.9
    told = [encode_json(event) for event in stream(kept, WORK, 0)]
    assert sum(len(value) + 200 for value in told) < BATCH_BYTES_MAX
