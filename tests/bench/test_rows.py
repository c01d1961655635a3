from __future__ import annotations

import json

import pytest

from bench.rows import row, show

FIELDS = ["metric", "unit", "at", "ours", "peer", "theirs", "ratio"]


def test_json_is_one_list_of_rows_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("ttft_p50_ms", "ms", 8, 12.34567, "vllm serve", 10.0), row("added_ms", "ms", 1, 3.0, "nothing", 0)]

    show(rows, as_json=True, title="not printed")

    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert err == ""
    first, second = json.loads(out)
    assert list(first) == list(second) == FIELDS
    assert first == {
        "metric": "ttft_p50_ms",
        "unit": "ms",
        "at": "8",
        "ours": 12.346,
        "peer": "vllm serve",
        "theirs": 10.0,
        "ratio": 1.235,
    }
    assert second["ratio"] is None


def test_the_table_shows_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    show([row("output_tokens_per_s", "tokens/s", 32, 180.0, "vllm serve", 190.0)], as_json=False, title="A title")

    out = capsys.readouterr().out
    for text in ("A title", "output_tokens_per_s", "32", "180.00", "190.00", "0.947", "vllm serve"):
        assert text in out
