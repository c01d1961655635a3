from __future__ import annotations

import asyncio

import pytest

from bench import fairness
from bench.fairness import AIM_RATIO, PEER, QUANTILES, SCRIPT, SLOTS, _measure, _Queue, _rows
from bench.rows import tell_aim
from schemas.errors import HeadraceError
from schemas.reasons import Reason

FIRST_MS = SCRIPT["first_token_ms"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of few calls, soon."""
    monkeypatch.setattr(fairness, "FLOOD", 5)
    monkeypatch.setattr(fairness, "FLOODED_S", 0.0)


async def test_the_peer_takes_as_many_as_it_has_slots_and_the_rest_in_the_order_in_which_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SCRIPT, "token_ms", 1)
    queue, ended = _Queue(), list[int]()

    async def ask(number: int) -> float:
        found = await queue.ask()
        ended.append(number)
        return found

    waits_ms = await asyncio.gather(*(ask(number) for number in range(SLOTS + 8)))

    assert min(waits_ms) >= FIRST_MS  # type: ignore[operator]
    assert min(waits_ms[SLOTS:]) >= 2 * FIRST_MS  # type: ignore[operator]  # another had to end before
    assert set(ended[:SLOTS]) == set(range(SLOTS))


async def test_a_tenant_is_measured_alone_and_beside_a_flood_that_goes_on(short: None) -> None:
    open_ = [0, 0]
    beside: list[int] = []

    async def quiet() -> float:
        await asyncio.sleep(0)
        beside.append(open_[1])
        return float(len(beside))

    async def flood() -> float:
        open_[1] += 1
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise HeadraceError(Reason.RATE_LIMITED, "a flood may be refused")
        finally:
            open_[1] -= 1

    alone, crowded = await _measure(quiet, 6, flood)

    assert (alone, crowded) == ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    assert beside[:6] == [0] * 6
    assert max(beside[6:]) > 0
    assert open_[1] == 0, "it ends with the measurement"


async def test_a_call_of_the_quiet_tenant_that_fails_ends_the_run(short: None) -> None:
    async def quiet() -> float:
        raise HeadraceError(Reason.UNAVAILABLE, "a call failed: 503")

    async def flood() -> float:
        await asyncio.sleep(3600)
        return 0.0

    with pytest.raises(HeadraceError, match="503"):
        await _measure(quiet, 2, flood)


def test_the_last_row_says_by_how_much_a_flood_makes_the_p95_longer(capsys: pytest.CaptureFixture[str]) -> None:
    *measured, last = _rows(([100.0] * 10, [140.0] * 10), ([100.0] * 10, [400.0] * 10))

    assert len(measured) == 2 * len(QUANTILES)
    assert (last.metric, last.unit, last.peer) == ("ttft_p95_flooded_to_quiet", "times", PEER)
    assert (last.ours, last.theirs, last.ratio) == (1.4, 4.0, 0.35)
    tell_aim(last, AIM_RATIO)
    assert "aim: ttft_p95_flooded_to_quiet within 1.5 times: met (1.40;" in capsys.readouterr().err
    tell_aim(last, 1.3)
    assert "missed" in capsys.readouterr().err
