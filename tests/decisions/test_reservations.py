from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decisions import reservations as rows_of
from decisions.ledger import Cost, Counter, Unit, Window, span
from decisions.quota import EACH, Exceeded, Quota, limits_for, reserve
from decisions.reservations import (
    ENDED_KEEP_MS,
    LAPSE_MS,
    NO_OFFSET,
    Reservation,
    Standing,
    droppable,
    ended,
    lapsed,
    repair,
    standing,
    withdrawn,
)
from tests.decisions.ledgers import GAPS, ONE_LIMIT, TIMEOUT_MS, Site, admitted, check_limits, ending, quota, rejected
from tests.decisions.worlds import NOW

LIMITS = limits_for([quota(tokens_per_minute=100)], "k1", "m")


def let_in(tokens: int = 80, offset: int = 7) -> tuple[Reservation, dict[str, Counter]]:
    found = reserve({}, LIMITS, Cost(tokens), NOW)
    assert not isinstance(found, Exceeded)
    return rows_of.admitted(admitted("r", offset, tokens, NOW), found.hold), found.changed


def tokens(counters: dict[str, Counter], at_ms: int = NOW) -> int:
    return counters[""].used(Window.MINUTE, Unit.TOKENS, at_ms)


# --- given, when, then -----------------------------------------------------------------------------------------------


def test_a_record_that_comes_again_is_told_from_another_with_its_id() -> None:
    row, _ = let_in(offset=7)
    assert standing(None, 7) is Standing.NEW
    assert standing(row, 7) is Standing.REDELIVERED
    assert standing(row, 8) is Standing.REPEATED


def test_a_refusal_is_kept_and_holds_nothing() -> None:
    event = rejected("r")
    row = rows_of.rejected(event, 7, NOW + TIMEOUT_MS)
    assert standing(row, 7) is Standing.REDELIVERED
    assert (row.rejected, row.stands) == (event, False)
    assert ended(row, ending("r", 50), NOW, {}) == (None, {})


def test_an_ending_settles_to_what_was_used_once() -> None:
    row, counters = let_in()
    after, changed = ended(row, ending("r", 50), NOW, counters)
    assert after is not None and not after.stands
    assert tokens(changed) == 50
    assert ended(after, ending("r", 50), NOW, changed) == (None, {})
    assert standing(after, 7) is Standing.REDELIVERED


def test_what_never_started_is_charged_nothing() -> None:
    row, counters = let_in()
    assert tokens(ended(row, ending("r", None), NOW, counters)[1]) == 0


def test_a_request_whose_ending_was_faster_reserves_nothing() -> None:
    row, changed = ended(None, ending("r", 0), NOW, {})
    assert row is not None and changed == {}
    assert standing(row, 7) is Standing.ENDED
    assert not droppable(row, NOW + ENDED_KEEP_MS - 1, 100, {})
    assert droppable(row, NOW + ENDED_KEEP_MS, 0, {})


def test_what_cant_be_sent_on_is_refused_and_has_used_up_nothing() -> None:
    row, counters = let_in()
    event = rejected("r")
    after, changed = withdrawn(row, event, counters)
    assert (after.admitted, after.rejected, after.stands) == (None, event, False)
    assert tokens(changed) == changed[""].used(Window.MINUTE, Unit.REQUESTS, NOW) == 0
    with pytest.raises(ValueError, match="stands"):
        withdrawn(after, event, changed)


def test_a_row_is_dropped_when_its_time_is_over_and_its_record_cant_come_again() -> None:
    row, counters = let_in(offset=7)
    done, _ = ended(row, ending("r", 50), NOW, counters)
    assert done is not None
    late, saved = NOW + TIMEOUT_MS, {"": 2}
    assert not droppable(row, late, 8, saved), "it stands"
    assert not droppable(done, late - 1, 8, saved)
    assert not droppable(done, late, 7, saved)
    assert not droppable(done, late, 8, {"": 1})
    assert droppable(done, late, 8, saved)


def test_a_reservation_whose_ending_is_lost_is_charged_in_full() -> None:
    row, counters = let_in(80)
    late = NOW + TIMEOUT_MS + LAPSE_MS
    assert lapsed(row, late - 1, counters) == (None, {})
    after, changed = lapsed(row, late, counters)
    assert after is not None and after.settled is not None
    assert (after.settled.tokens, changed[""].held, changed[""].tokens_total) == (80, 0, 80)
    assert lapsed(after, late, changed) == (None, {})


def test_repair_ignores_rows_that_hold_nothing() -> None:
    row, counters = let_in()
    note = Reservation(NO_OFFSET, NOW)
    assert repair({}, [row, note, rows_of.rejected(rejected("q"), 8, NOW)]) == counters


# --- any interleaving ------------------------------------------------------------------------------------------------

IDS = st.sampled_from([f"r{number}" for number in range(8)])


class AnyInterleaving(RuleBasedStateMachine):
    """Requests, endings, cancels, duplicates, timeouts and crashes in any order, judged by what an outsider noted."""

    def __init__(self) -> None:
        super().__init__()
        self.site = Site(())
        self.fresh = 0

    @initialize(whole=ONE_LIMIT, each=ONE_LIMIT)
    def begin(self, whole: Quota, each: Quota) -> None:
        self.site = Site((whole, replace(each, key_id=EACH)))

    @rule(tokens=st.integers(0, 30), key=st.sampled_from(["k1", "k2"]), gap_ms=GAPS, together=st.integers(1, 4))
    def ask(self, tokens: int, key: str, gap_ms: int, together: int) -> None:
        for number in range(together):
            self.fresh += 1
            self.site.ask(f"f{self.fresh}", tokens, key, 0 if number else gap_ms)

    @rule(tokens=st.integers(0, 30), key=st.sampled_from(["k1", "k2"]), gap_ms=GAPS, together=st.integers(1, 4))
    def ask_and_decide(self, tokens: int, key: str, gap_ms: int, together: int) -> None:
        self.ask(tokens, key, gap_ms, together)
        while self.site.take_request() is not None:
            pass

    @rule(request_id=IDS, tokens=st.integers(0, 30), gap_ms=st.integers(-2_000, 40_000))
    def ask_again(self, request_id: str, tokens: int, gap_ms: int) -> None:
        self.site.ask(request_id, tokens, "k1", gap_ms)

    @rule(count=st.integers(1, 6))
    def decide(self, count: int) -> None:
        for _ in range(count):
            self.site.take_request()

    @precondition(lambda self: self.site.sent())
    @rule(data=st.data(), used=st.integers(0, 40), times=st.integers(1, 2))
    def end(self, data: st.DataObject, used: int, times: int) -> None:
        """A worker, or the timer: whatever it used, and perhaps told twice."""
        request_id = data.draw(st.sampled_from(self.site.sent()))
        self.site.endings += [ending(request_id, used)] * times

    @rule(share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def end_all(self, share: float) -> None:
        """What runs now ends, and that is heard, so that only windows and budgets limit."""
        for request_id in self.site.sent():
            row = self.site.rows[request_id]
            assert row.hold is not None
            self.site.endings.append(ending(request_id, int(share * row.hold.cost.tokens)))
        while self.site.take_ending():
            pass

    @rule(request_id=IDS)
    def cancel(self, request_id: str) -> None:
        """Of something that runs, that ended, or that nobody has asked for yet."""
        self.site.endings.append(ending(request_id, 0))

    @rule(count=st.integers(1, 3))
    def settle(self, count: int) -> None:
        for _ in range(count):
            self.site.take_ending()

    @rule(commit=st.booleans())
    def flush(self, commit: bool) -> None:
        self.site.flush(commit=commit)

    @rule()
    def save(self) -> None:
        self.site.save()

    @rule()
    def sweep(self) -> None:
        self.site.sweep()

    @rule(survives=st.floats(0, 1))
    def crash(self, survives: float) -> None:
        self.site.crash(survives)

    @invariant()
    def no_limit_is_passed_in_any_window(self) -> None:
        check_limits(self.site.truths, self.site.quotas, self.site.newest_ms)

    @invariant()
    def counters_are_what_an_outsider_counts(self) -> None:
        for scope, counter in self.site.counters.items():
            here = [truth for truth in self.site.truths if scope in ("", f"key {truth.asked.key}")]
            standing = [truth for truth in here if truth.used is None]
            assert counter.running == len(standing)
            assert counter.held == sum(truth.asked.tokens for truth in standing)
            assert counter.requests_total == len(here)
            assert counter.tokens_total == sum(truth.used or 0 for truth in here)

    def teardown(self) -> None:
        """At rest, what is charged is what was generated, and nothing is held."""
        site = self.site
        while site.take_request() is not None:
            pass
        site.flush(commit=True)
        site.endings += [ending(request_id, 7) for request_id in site.sent()]
        while site.take_ending():
            pass
        self.counters_are_what_an_outsider_counts()
        assert not any(row.stands for row in site.rows.values())
        for counter in site.counters.values():
            assert (counter.running, counter.held) == (0, 0)
            if span(Window.MONTH, site.newest_ms)[0] <= NOW:
                assert counter.used(Window.MONTH, Unit.TOKENS, site.newest_ms) == counter.tokens_total


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
