"""The clock: each open request is answered at its deadline unless it has begun, and at its time limit once it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.accounts import ANY_TIER
from decisions.deadlines import PASSED_MAX, STOPPED_WITHIN_MS, TOLD_AGAIN_MS, TOLD_MAX, WATCHED_MAX, Watch, Word
from decisions.endings import refused
from decisions.recalled import RECALLED_RECORDS
from decisions.stream import NEW, fold
from schemas.events import (
    Attempt,
    GenerationStarted,
    InferenceAdmitted,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceStarted,
    Position,
    Reply,
    Timings,
    Usage,
)
from schemas.topics import TOKENS

T0 = 1_800_000_000_000
DEADLINE_MS = T0 + 1_000
LIMIT_MS = 5_000
REPLY = Reply(TOKENS, 3)
A = Attempt(1, 1)
ALL = 1_000


def admitted(rid: str = "r", tenant: str = "acme", **changes: Any) -> InferenceAdmitted:
    source = Position("requests.interactive", 0, 0)
    event = InferenceAdmitted(
        rid, tenant, "k", "m", "1", "interactive", REPLY, "work", 0, 3, 7, 10, T0, DEADLINE_MS, source
    )
    return replace(event, **{"time_limit_ms": LIMIT_MS, **changes})


def started(rid: str = "r", tenant: str = "acme") -> InferenceStarted:
    return InferenceStarted(rid, tenant, "m", "1", "interactive", A, "w", 1.0, Position(TOKENS, 3, 9))


def completed(rid: str = "r", tenant: str = "acme") -> InferenceCompleted:
    return InferenceCompleted(rid, tenant, "m", "1", "interactive", A, (), Usage(3, 0), Timings(), "w")


def failed(rid: str = "r", tenant: str = "acme", tier: str = "interactive") -> InferenceFailed:
    return InferenceFailed(rid, tenant, "m", "1", tier, "cancelled", "")


def watching(*events: Any, at_ms: int = T0) -> Watch:
    watch = Watch(10)
    for offset, event in enumerate(events, 10):
        watch.apply(offset, at_ms, event)
    return watch


def test_what_has_not_begun_is_ended_at_its_deadline_and_not_before() -> None:
    watch = watching(admitted())
    assert watch.next_due_ms == DEADLINE_MS
    assert watch.due(DEADLINE_MS - 1, ALL) == []
    (word,) = watch.due(DEADLINE_MS, ALL)
    assert (word.reply, word.ending.reason, word.ending.source) == (REPLY, "deadline_exceeded", "timer")
    assert word.ending.if_not_started
    assert word.cancel is None, "it may begin at this moment, and then it must go on"


def test_a_word_that_comes_too_late_does_not_count() -> None:
    (word,) = watching(admitted()).due(DEADLINE_MS, ALL)
    begun = GenerationStarted("r", "acme", "m", "1", "interactive", A, (0,), 3, "w")
    state, _ = fold(NEW, begun)
    assert fold(state, word.ending) == (state, False)
    assert fold(NEW, word.ending)[0].closed is not None


@pytest.mark.parametrize("ending", [completed(), failed()])
def test_what_has_ended_needs_no_word(ending: Any) -> None:
    watch = watching(admitted(), ending)
    assert watch.due(DEADLINE_MS + 10**9, ALL) == []
    assert len(watch) == 0


def test_an_id_that_another_tier_let_in_too_has_its_own_deadline_and_ending_there() -> None:
    batch = admitted(tier="batch", deadline_ms=DEADLINE_MS + 1)
    watch = watching(admitted(), batch, completed())
    assert len(watch) == 1
    (word,) = watch.due(DEADLINE_MS + 1, ALL)
    assert word.ending.tier == "batch"
    watch.apply(13, T0, replace(failed(), tier=""))
    assert len(watch) == 0, "a cancel that names no tier ends it on each"


def refused_after_all() -> InferenceFailed:
    """As `endings` tells it, once somebody begins what a refusal has closed."""
    begun = GenerationStarted("r", "acme", "m", "1", "interactive", A, (0,), 3, "w")
    return refused(begun, "rate_limited")


@pytest.mark.parametrize("events", [(admitted(), refused_after_all()), (refused_after_all(), admitted())])
def test_who_works_on_what_was_refused_after_all_is_told_to_stop_once(events: Any) -> None:
    watch = watching(*events)
    assert watch.stops(T0, 0) == []
    assert watch.stops(T0, ALL) == [InferenceCancelled("r", "acme")]
    assert watch.stops(T0, ALL) == []


def test_who_works_on_what_has_another_ending_is_told_nothing_here() -> None:
    assert watching(admitted(), completed(), failed()).stops(T0, ALL) == []


@pytest.mark.parametrize(
    "ended", [completed(), failed(), failed(tier=ANY_TIER)], ids=["completed", "failed", "no tier"]
)
def test_of_an_id_that_was_let_in_twice_whatever_still_runs_is_told_to_stop_once_it_has_ended(ended: Any) -> None:
    """Only one of the two works has a stream, and no other ending will come."""
    watch = watching(admitted(), admitted())
    assert watch.stops(T0, ALL) == []
    for events in ((admitted(), admitted(), ended), (admitted(), ended, admitted()), (ended, admitted())):
        watch = watching(*events)
        assert watch.stops(T0, ALL) == [InferenceCancelled("r", "acme")]
        assert watch.stops(T0, ALL) == []


def test_what_ended_is_forgotten_when_whoever_lets_in_forgets_it() -> None:
    for later, stops in ((RECALLED_RECORDS - 1, 1), (RECALLED_RECORDS, 0)):
        watch = watching(admitted(), completed())
        watch.apply(11 + later, T0, admitted())
        assert len(watch.stops(T0, ALL)) == stops


def test_what_was_refused_long_ago_when_it_is_read_needs_no_word() -> None:
    assert watching(refused_after_all()).stops(T0 + STOPPED_WITHIN_MS, ALL) == []


def test_what_has_begun_may_take_its_time_and_no_longer() -> None:
    watch = watching(admitted(), started(), at_ms=T0 + 500)
    assert watch.due(DEADLINE_MS, ALL) == []
    assert watch.due(T0 + 500 + LIMIT_MS - 1, ALL) == []
    (word,) = watch.due(T0 + 500 + LIMIT_MS, ALL)
    assert (word.ending.reason, word.ending.if_not_started) == ("time_limit_exceeded", False)
    assert word.cancel is not None
    assert (word.cancel.request_id, word.cancel.tenant) == ("r", "acme")


def test_a_start_that_is_heard_after_the_word_has_its_limit() -> None:
    watch = watching(admitted())
    assert watch.due(DEADLINE_MS, ALL)
    watch.apply(11, DEADLINE_MS, started())
    assert watch.due(DEADLINE_MS + LIMIT_MS - 1, ALL) == []
    (word,) = watch.due(DEADLINE_MS + LIMIT_MS, ALL)
    assert word.ending.reason == "time_limit_exceeded"


def test_without_a_limit_what_has_begun_is_not_watched() -> None:
    assert len(watching(admitted(time_limit_ms=None), started())) == 0


def test_a_word_without_an_ending_is_said_again_a_few_times() -> None:
    watch, said, now_ms = watching(admitted()), 0, DEADLINE_MS
    while len(watch):
        said += len(watch.due(now_ms, ALL))
        assert watch.due(now_ms + TOLD_AGAIN_MS - 1, ALL) == []
        now_ms += TOLD_AGAIN_MS
    assert said == TOLD_MAX
    assert watch.committable == 11


def test_what_the_log_took_too_late_is_anothers_to_decide() -> None:
    assert len(watching(admitted(valid_until_ms=T0 - 1))) == 0
    assert len(watching(admitted(valid_until_ms=T0))) == 1


def test_a_request_admitted_twice_is_one() -> None:
    watch = watching(admitted(), admitted())
    assert len(watch.due(DEADLINE_MS, ALL)) == 1
    watch.apply(12, T0, completed())
    assert len(watch) == 0


def test_another_tenants_request_of_the_same_id_is_another() -> None:
    watch = watching(admitted(), admitted(tenant="other"), completed())
    (word,) = watch.due(DEADLINE_MS, ALL)
    assert word.ending.tenant == "other"


def test_strangers_say_nothing() -> None:
    assert len(watching(started(), completed(), failed(), None, "x")) == 0


def test_no_more_words_at_once_than_asked_for() -> None:
    watch = watching(*(admitted(str(number)) for number in range(10)))
    assert [len(watch.due(DEADLINE_MS, 4)) for _ in range(4)] == [4, 4, 2, 0]


def test_the_oldest_of_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WATCHED_MAX > 3
    monkeypatch.setattr("decisions.deadlines.WATCHED_MAX", 3)
    watch = watching(*(admitted(str(number)) for number in range(5)))
    assert len(watch) == 3
    assert watch.committable == 12
    assert [word.ending.request_id for word in watch.due(DEADLINE_MS, ALL)] == ["2", "3", "4"]


def test_what_has_ended_takes_no_memory() -> None:
    watch = Watch(0)
    for number in range(0, 20_000, 2):
        watch.apply(number, T0, admitted(str(number)))
        watch.apply(number + 1, T0, completed(str(number)))
    assert len(watch._due) <= PASSED_MAX + 1


IDS = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.builds(lambda rid, after: admitted(rid, deadline_ms=T0 + after), IDS, st.integers(0, 50)),
        st.builds(started, IDS),
        st.builds(completed, IDS),
        st.integers(1, 30),
    ),
    max_size=40,
)


@given(STEPS, st.integers(0, 40))
def test_after_a_restart_at_the_committed_offset_the_same_is_open_and_said(steps: list[Any], cut: int) -> None:
    """Whatever was said before is said again at most; nothing that is open is forgotten."""
    now_ms, log = T0, list[tuple[int, Any]]()
    first, words = Watch(0), list[Word]()
    for number, step in enumerate(steps):
        if number == cut:
            restarted = Watch(first.committable)
            for offset, (at_ms, event) in enumerate(log):
                if offset >= first.committable:
                    restarted.apply(offset, at_ms, event)
            assert len(restarted) == len(first)
            first = restarted
        if isinstance(step, int):
            now_ms += step
            words += first.due(now_ms, ALL)
        else:
            first.apply(len(log), now_ms, step)
            log.append((now_ms, step))
        assert 0 <= first.committable <= len(log)
    words += first.due(now_ms + 10**6, ALL)
    for rid in "abc":
        events = [event for _, event in log if event.request_id == rid]
        admissions = [event for event in events if isinstance(event, InferenceAdmitted)]
        open_at_the_end = admissions and not isinstance(events[-1], InferenceCompleted)
        if open_at_the_end and isinstance(events[-1], InferenceAdmitted):
            assert any(word.ending.request_id == rid for word in words)


def test_what_cannot_be_read_is_passed_over_and_no_open_request_is() -> None:
    watch = watching(admitted())
    watch.pass_over(40)
    assert watch.committable == 10
    watch.apply(40, T0, completed())
    assert watch.committable == 41
    watch.pass_over(44)
    assert watch.committable == 44
    watch.pass_over(3)
    assert watch.committable == 44
