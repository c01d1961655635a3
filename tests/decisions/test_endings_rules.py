"""What a folded stream becomes."""

from __future__ import annotations

import pytest

from decisions.endings import Facts, answered, facts
from decisions.stream import NEW, fold
from schemas.events import InferenceRejected


@pytest.mark.parametrize("retry_after_ms", [None, 1_500])
def test_an_answer_tells_when_what_was_refused_may_be_asked_again(retry_after_ms: int | None) -> None:
    refusal = InferenceRejected("r", "acme", "m", "batch", "rate_limited", "full", retry_after_ms=retry_after_ms)
    state, _ = fold(NEW, refusal)
    answer = answered(state, facts(Facts(), refusal), refusal, ())
    assert (answer.error_reason, answer.retry_after_ms) == ("rate_limited", retry_after_ms)
