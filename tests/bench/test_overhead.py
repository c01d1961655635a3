from __future__ import annotations

import pytest

from bench.load import Result, Sample
from bench.overhead import Measured, _direct, _rows

SCRIPT: dict[str, object] = {"tokens": ["a", "b", "c"], "first_token_ms": 20, "token_ms": 1}


async def test_direct_calls_follow_the_script() -> None:
    result = await _direct(SCRIPT, 4, 10)

    assert len(result.good) == 10
    assert all(sample.ttft_ms >= 19 for sample in result.good)
    assert all(sample.tokens >= 3 for sample in result.good)


def test_what_is_added_is_the_difference_of_the_quantiles() -> None:
    def result(first_s: float) -> Result:
        return Result(1, [Sample(0.0, first_s=first_s, last_s=first_s, tokens=1)] * 3, 1.0)

    rows = _rows({("", 1): Measured(result(0.02), result(0.03), ())})

    assert [row.metric for row in rows] == ["added_ttft_p50_ms", "added_ttft_p99_ms"]
    for row in rows:
        assert row.ours == pytest.approx(10)
        assert row.theirs == pytest.approx(20)
        assert row.ratio == pytest.approx(0.5)
