from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import orjson
import pytest

from bench.load import Client, Sample
from bench.pair import CRASH, Pair
from bench.pauses import Heard, Shares
from bench.takeover import (
    BLOWS,
    DRAIN_S,
    PEER,
    ROUNDS,
    STREAMS,
    TOKEN_MS,
    TOKENS,
    Found,
    _body,
    _judge,
    _rows,
    _show_shares,
    answer_text,
    moment_s,
    require_exact,
)
from infra.ports import free_port
from infra.supervisor import ChildSpec, Supervisor
from schemas.errors import HeadraceError
from schemas.reasons import Reason


def found(*pauses_ms: float) -> dict[str, Found]:
    return {blow: Found(list(pauses_ms), [20.0], [Shares(100, 20, 30)]) for blow in BLOWS}


def test_each_blow_has_a_row_for_the_middle_and_one_for_the_worst() -> None:
    rows = _rows(found(100, 200, 300), found(1_000, 2_000, 3_000))

    assert [(row.metric, row.at, row.peer) for row in rows] == [
        ("crash_pause_p50_ms", "all", PEER),
        ("crash_pause_p99_ms", "all", PEER),
        ("drain_pause_p50_ms", "all", PEER),
        ("drain_pause_p99_ms", "all", PEER),
    ]
    assert [(row.ours, row.theirs, row.ratio) for row in rows[:2]] == [(200, 2_000, 0.1), (298, 2_980, 0.1)]


def test_a_blow_comes_while_answers_run_and_a_drain_cuts_them() -> None:
    moments = [moment_s(number, ROUNDS) for number in range(ROUNDS)]

    assert moments[0] > 0
    assert moments[-1] + DRAIN_S < TOKENS * TOKEN_MS / 1000
    steps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_no_two_answers_are_alike_and_each_is_the_same_every_time() -> None:
    texts = [answer_text(number) for number in range(STREAMS)]

    assert len(set(texts)) == STREAMS
    assert texts == [answer_text(number) for number in range(STREAMS)]
    script = orjson.loads(orjson.loads(_body(3))["messages"][0]["content"])
    assert "".join(script["tokens"]) == texts[3]


@pytest.mark.parametrize(
    ("error", "text", "reason"),
    [
        ("reset", "ab", Reason.UNAVAILABLE),
        (None, "aab", Reason.INCONSISTENT_STREAM),
        (None, "a", Reason.INCONSISTENT_STREAM),
    ],
)
def test_an_answer_that_is_not_exact_ends_the_run(error: str | None, text: str, reason: Reason) -> None:
    with pytest.raises(HeadraceError) as raised:
        require_exact(Sample(0.0, error=error), Heard(text), "ab")

    assert raised.value.reason is reason
    require_exact(Sample(0.0), Heard("ab"), "ab")


def test_aims_are_judged_by_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    _judge({"crash": Found([9_000, 12_001]), "drain": Found([100, 300])}, 10_000)

    crash, drain = capsys.readouterr().err.splitlines()
    assert "12000 ms" in crash
    assert "missed" in crash
    assert "300 ms" in drain
    assert "met" in drain


def test_the_parts_of_a_pause_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _show_shares(found(160))

    out = capsys.readouterr().out
    for text in ("noticed", "100", "150", "160", "1, 1"):
        assert text in out


async def test_a_replica_that_is_killed_comes_back_and_its_caller_asks_the_other(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]

    def spec(number: int, _: int) -> ChildSpec:
        argv = (sys.executable, "-m", "bench.plain", str(ports[number]), str(DRAIN_S))
        return ChildSpec(f"plain-{number}", argv, dict(os.environ), ports[number], restart=False)

    urls = [f"http://127.0.0.1:{port}/v1/chat/completions" for port in ports]
    heard, cut = Heard(), []
    async with Supervisor(tmp_path) as supervisor, Pair(supervisor, spec) as pair:

        def hear(at_s: float, text: str) -> None:
            heard.take(at_s, text)
            if len(heard.text) == 5:
                cut.append(pair.strike(0, CRASH))

        async with Client(urls[0]) as first, Client(urls[1]) as second:
            broken = await first.call(_body(0), hear)
            assert broken.error is not None
            assert answer_text(0).startswith(heard.text)
            heard.again()
            whole = await second.call(_body(0), heard.take)
            require_exact(whole, heard, answer_text(0))
            await pair.whole()
            assert (await first.call(_body(1))).tokens == TOKENS + 1  # the end counts
    assert cut == [0]
    assert heard.pause_ms >= 5 * TOKEN_MS
