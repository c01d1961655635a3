from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.ledger import (
    NEW,
    SLOTS_MAX,
    STEP_BACK_MS,
    Charges,
    Cost,
    Counter,
    Hold,
    Unit,
    Window,
    amount,
    hold,
    settle,
    span,
    withdraw,
)
from schemas.topics import DAY_MS, HOUR_MS
from tests.decisions.ledgers import settled_all
from tests.decisions.worlds import NOW

WHOLE = ("",)
MINUTE, DAY, MONTH = Window
MIDNIGHT = NOW - NOW % DAY_MS + DAY_MS


def holding(*charges: tuple[int, int]) -> tuple[Counter, list[Hold]]:
    """A counter after these charges, each a moment (from NOW on) and tokens."""
    counters: dict[str, Counter] = {}
    made = []
    for at, tokens in charges:
        one, counters = hold(counters, WHOLE, Cost(tokens), NOW + at)
        made.append(one)
    return counters[""], made


def tokens(counter: Counter, at: int, window: Window = MINUTE) -> int:
    return counter.used(window, Unit.TOKENS, NOW + at)


def requests(counter: Counter, at: int) -> int:
    return counter.used(MINUTE, Unit.REQUESTS, NOW + at)


def settled(counter: Counter, made: Hold, used: int) -> Counter:
    return settle({"": counter}, made, used)[""]


# --- given, when, then -----------------------------------------------------------------------------------------------


def test_what_is_held_counts_at_once_and_what_was_used_until_a_minute_after_admission() -> None:
    counter, (made,) = holding((0, 100))
    assert (tokens(counter, 0), requests(counter, 0), counter.running) == (100, 1, 1)
    counter = settled(counter, made, 30)
    assert (tokens(counter, 0), requests(counter, 0), counter.running) == (30, 1, 0)
    assert tokens(counter, 59_999) == 30
    assert (tokens(counter, 60_000), requests(counter, 60_000)) == (0, 0)


def test_what_stands_counts_however_old_it_is() -> None:
    counter, (made,) = holding((0, 100))
    assert tokens(counter, 3 * DAY_MS) == tokens(counter, 3 * DAY_MS, DAY) == 100
    assert requests(counter, 60_000) == 0
    counter = settled(counter, made, 70)
    assert tokens(counter, 60_000) == 0
    assert counter.tokens_total == 70


def test_the_rest_returns_to_the_window_it_was_taken_from() -> None:
    counter, (old, new) = holding((0, 100), (40_000, 10))
    counter = settled(counter, old, 60)
    assert tokens(counter, 59_999) == 70
    assert tokens(counter, 60_000) == 10
    assert tokens(settled(counter, new, 1), 60_000) == 1


def test_the_rest_of_a_window_that_is_long_gone_returns_nowhere() -> None:
    counter, (old, _) = holding((0, 100), (100_000, 10))
    assert len(counter.minute.slots) == 1
    assert tokens(counter, 100_000) == 110
    counter = settled(counter, old, 60)
    assert tokens(counter, 100_000) == 10
    assert tokens(counter, 100_000, MONTH) == 70


def test_tokens_belong_to_the_day_of_their_admission() -> None:
    before = MIDNIGHT - NOW - 1
    counter, (made, _) = holding((before, 100), (before + 2, 10))
    assert tokens(counter, before + 2, DAY) == 110, "it stands, so it counts today as well"
    counter = settled(counter, made, 60)
    assert tokens(counter, before + 2, DAY) == 10
    assert tokens(counter, before, DAY) == 70, "a step back over midnight forgets nothing"


def test_a_slow_caller_is_counted_to_the_millisecond_and_a_fast_one_to_the_second() -> None:
    slow, _ = holding((400, 1), (1_400, 1), (2_400, 1))
    assert [tokens(settled_all(slow), 60_000 + at) for at in (399, 400, 1_400, 2_400)] == [3, 2, 1, 0]
    fast, _ = holding((0, 1), (300, 1), (900, 1))
    assert [tokens(settled_all(fast), 60_000 + at) for at in (0, 899, 900)] == [3, 3, 0]


def test_a_row_stays_small() -> None:
    counter, _ = holding(*((at * 250, 4_096) for at in range(4 * 3_600)))
    assert len(counter.minute.slots) <= SLOTS_MAX
    assert len(counter.day.slots) == len(counter.month.slots) == 1


def test_a_step_back_forgets_no_charge() -> None:
    counter, made = holding((0, 100), (60_000 + STEP_BACK_MS - 1, 1))
    counter = settled(counter, made[0], 100)
    assert tokens(counter, 59_999) == 101


def test_a_charge_after_a_step_back_counts_longer_not_shorter() -> None:
    counter, made = holding((4_000, 1), (0, 10))
    assert made[1].charged_ms == NOW + 4_000
    assert tokens(settled_all(counter), 63_999) == 11


def test_no_more_is_charged_than_was_reserved() -> None:
    counter, (made,) = holding((0, 100))
    assert settled(counter, made, 101) == settled(counter, made, 100)


def test_a_withdrawn_request_has_used_up_nothing() -> None:
    counter, (made,) = holding((0, 100))
    counter = withdraw({"": counter}, made)[""]
    assert tokens(counter, 0) == requests(counter, 0) == counter.running == 0
    assert (counter.requests_total, counter.tokens_total) == (0, 0)


def test_an_answer_from_a_cache_counts_as_a_request_that_runs_nowhere() -> None:
    _, changed = hold({}, WHOLE, Cost(0, running=0), NOW)
    assert (requests(changed[""], 0), changed[""].running) == (1, 0)


def test_scopes_are_charged_together_and_apart_from_others() -> None:
    one, counters = hold({}, ("", "key a"), Cost(5), NOW)
    two, changed = hold(counters, ("", "key b"), Cost(7), NOW)
    counters |= changed
    assert {scope: counter.held for scope, counter in counters.items()} == {"": 12, "key a": 5, "key b": 7}
    assert (one.scopes, two.scopes) == (("", "key a"), ("", "key b"))
    changed = settle(counters, one, 2)
    assert {scope: (counter.held, counter.tokens_total) for scope, counter in changed.items()} == {
        "": (7, 2),
        "key a": (0, 2),
    }
    assert set(withdraw(counters, two)) == {"", "key b"}


def test_nothing_is_settled_where_nothing_is_held() -> None:
    _, made = holding((0, 100))
    with pytest.raises(KeyError):
        settle({}, made[0], 1)


# --- time ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, int(datetime(2399, 12, 31, tzinfo=UTC).timestamp()) * 1_000))
def test_days_and_months_are_the_calendars(at_ms: int) -> None:
    at = datetime.fromtimestamp(at_ms // 1_000, UTC)
    first = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    assert span(MONTH, at_ms) == (first.timestamp() * 1_000, following.timestamp() * 1_000)
    opened_ms, expires_ms = span(DAY, at_ms)
    assert opened_ms == at.replace(hour=0, minute=0, second=0, microsecond=0).timestamp() * 1_000
    assert expires_ms - opened_ms == DAY_MS


@pytest.mark.parametrize("window", [DAY, MONTH])
def test_a_period_begins_with_its_first_millisecond(window: Window) -> None:
    opened_ms, expires_ms = span(window, NOW)
    assert span(window, opened_ms) == span(window, expires_ms - 1) == (opened_ms, expires_ms)
    assert span(window, expires_ms)[0] == expires_ms
    assert span(window, opened_ms - 1)[1] == opened_ms


# --- properties ------------------------------------------------------------------------------------------------------

GAPS = st.one_of(st.integers(0, 3_000), st.integers(-STEP_BACK_MS, 40_000), st.sampled_from([DAY_MS, HOUR_MS]))
CHARGES = st.lists(st.tuples(GAPS, st.integers(0, 50), st.integers(0, 50)), max_size=40)


@given(CHARGES, st.integers(0, 100_000), st.integers(0, 500))
def test_what_is_in_use_falls_when_it_is_said_to_and_not_before(
    charges: list[tuple[int, int, int]], later: int, most: int
) -> None:
    at, moments = 0, []
    for gap, _, _ in charges:
        at += gap
        moments.append(max(0, at))
    counter, made = (
        holding(*((moment, size) for moment, (_, size, _) in zip(moments, charges, strict=True)))
        if charges
        else (NEW, [])
    )
    for one, (_, size, used) in zip(made, charges, strict=True):
        if used <= size and used % 2:
            counter = settled(counter, one, used)
    now_ms = NOW + max(moments, default=0) + later
    for window in Window:
        for unit in (Unit.REQUESTS, Unit.TOKENS):
            falls_ms = counter.falls_to(most, window, unit, now_ms)
            assert settled_all(counter).used(window, unit, falls_ms) <= most
            assert falls_ms == now_ms or counter.used(window, unit, falls_ms - 1) > most


@given(CHARGES, st.data())
def test_in_whatever_order_they_end_a_counter_is_the_sum_of_its_slots(
    charges: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    at, moments = 0, []
    for gap, size, _ in charges:
        at = max(0, at + gap)
        moments.append((at, size))
    counter, made = holding(*moments) if moments else (NEW, [])
    ends = data.draw(st.permutations(list(zip(made, charges, strict=True))))
    for one, (_, _, used) in ends:
        counter = withdraw({"": counter}, one)[""] if used == 0 else settled(counter, one, used)
        for window in Window:
            assert counter.charges(window) == Charges.of(counter.charges(window).slots)
            assert all(min(slot.requests, slot.spent, slot.held) >= 0 for slot in counter.charges(window).slots)
    kept = [min(size, used) for _, size, used in charges if used]
    assert (counter.running, counter.held) == (0, 0)
    assert (counter.requests_total, counter.tokens_total) == (len(kept), sum(kept))
    assert all(amount(slot, Unit.TOKENS) == slot.spent for slot in counter.month.slots)
