from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from decisions.stream import COMPLETED, FAILED, NEW, REJECTED, Input, StreamState, fold
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    Timings,
    TokensGenerated,
    Usage,
)

A, B, C = Attempt(1, 1), Attempt(2, 1), Attempt(2, 2)


def started(attempt: Attempt, at: tuple[int, ...] = (0,), tenant: str = "acme") -> GenerationStarted:
    return GenerationStarted("r", tenant, "m", "v1", "interactive", attempt, at, 3, "w")


def tokens(attempt: Attempt, first: int, count: int, choice: int = 0) -> TokensGenerated:
    """The true answer's token at place i is i, whoever makes it."""
    return TokensGenerated("r", choice, attempt, first, tuple(range(first, first + count)), "")


def taken_over(attempt: Attempt, tenant: str = "acme") -> GenerationTakenOver:
    return GenerationTakenOver("r", tenant, "m", "v1", "interactive", attempt, "w")


def released(attempt: Attempt) -> GenerationReleased:
    return GenerationReleased("r", attempt, "w")


def completed(attempt: Attempt, *totals: int) -> InferenceCompleted:
    ends = tuple(ChoiceEnd(choice, total, "stop") for choice, total in enumerate(totals))
    return InferenceCompleted(
        "r", "acme", "m", "v1", "interactive", attempt, ends, Usage(3, sum(totals)), Timings(), "w"
    )


def failed(
    attempt: Attempt | None, reason: str = "engine_error", totals: tuple[int, ...] = (), **how: Any
) -> InferenceFailed:
    event = InferenceFailed("r", "acme", "m", "v1", "interactive", reason, "", attempt, totals)
    return replace(event, **how) if how else event


CANCEL = failed(None, "cancelled", source="cancel")
TIMER = failed(None, "deadline_exceeded", if_not_started=True, source="timer")
REJECTION = InferenceRejected("r", "acme", "m", "interactive", "model_not_found", "no")


def run(*events: Input, state: StreamState = NEW) -> tuple[StreamState, list[bool]]:
    counted = []
    for event in events:
        state, counts = fold(state, event)
        counted.append(counts)
    return state, counted


# --- given, when, then -----------------------------------------------------------------------------------------------


def test_an_answer_in_one_go() -> None:
    state, counted = run(started(A), tokens(A, 0, 2), tokens(A, 2, 1), completed(A, 3))
    assert all(counted)
    assert state.closed is not None and state.closed.outcome == COMPLETED
    assert state.accepted == (3,)


def test_choices_are_counted_apart() -> None:
    state, counted = run(
        started(A, (0, 0)), tokens(A, 0, 1, choice=1), tokens(A, 0, 2), tokens(A, 0, 1, choice=2), completed(A, 2, 1)
    )
    assert counted == [True, True, True, False, True]
    assert state.accepted == (2, 1)


def test_nothing_counts_before_a_start() -> None:
    assert run(tokens(A, 0, 1), completed(A, 0), released(A), failed(A))[1] == [False] * 4


def test_a_new_owner_goes_on_and_the_former_no_longer_counts() -> None:
    state, counted = run(
        started(A),
        tokens(A, 0, 2),
        taken_over(B),
        tokens(A, 2, 1),
        completed(A, 3),
        started(B, (2,)),
        tokens(B, 2, 2),
        tokens(A, 4, 1),
        completed(B, 4),
    )
    assert counted == [True, True, True, False, False, True, True, False, True]
    assert state.accepted == (4,) and state.failures == 1


def test_a_former_owners_late_marker_is_ignored() -> None:
    state, counted = run(taken_over(B), taken_over(A), started(A), started(B), tokens(B, 0, 1), completed(B, 1))
    assert counted == [True, False, False, True, True, True]
    assert state.failures == 0


def test_a_second_start_without_a_takeover_is_a_duplicate_work_record() -> None:
    state, counted = run(started(A), started(B), tokens(B, 0, 1), tokens(A, 0, 1), completed(B, 1), completed(A, 1))
    assert counted == [True, False, False, True, False, True]
    assert state.attempt == A


def test_who_drains_does_no_harm() -> None:
    state, _ = run(started(A), tokens(A, 0, 1), released(A), taken_over(B), started(B, (1,)))
    assert state.failures == 0 and state.started


def test_who_releases_goes_on_until_another_takes_over() -> None:
    state, counted = run(
        started(A),
        released(A),
        tokens(A, 0, 2),
        released(A),
        taken_over(B),
        tokens(A, 2, 1),
        released(A),
        completed(A, 3),
        started(B, (2,)),
    )
    assert counted == [True, True, True, False, True, False, False, False, True]
    assert state.accepted == (2,) and state.failures == 0 and not state.released


def test_who_keeps_what_it_released_is_its_owner_as_before() -> None:
    state, counted = run(started(A), released(A), tokens(A, 0, 1), started(A, (1,)), tokens(A, 1, 1), taken_over(B))
    assert counted == [True] * 6
    assert state.accepted == (2,) and state.failures == 1


def test_who_releases_may_still_end_it() -> None:
    state, _ = run(started(A), released(A), tokens(A, 0, 1), completed(A, 1))
    assert state.closed is not None and state.closed.outcome == "completed"


def test_what_is_released_without_a_token_may_be_ended_by_the_timer() -> None:
    assert run(started(A), released(A), TIMER)[1] == [True, True, True]
    assert run(started(A), released(A), started(A), TIMER)[1] == [True, True, True, False]
    assert run(started(A), released(A), tokens(A, 0, 1), TIMER)[1] == [True, True, True, False]


def test_tokens_out_of_line_do_not_count() -> None:
    assert run(started(A), tokens(A, 1, 1), tokens(A, 0, 1), tokens(A, 0, 1), tokens(A, 2, 1))[1] == [
        True,
        False,
        True,
        False,
        False,
    ]


def test_a_wrong_total_closes_as_failed() -> None:
    for event in (completed(A, 2), failed(A, totals=(2,))):
        state, _ = run(started(A), tokens(A, 0, 1), event)
        assert state.closed is not None and state.closed.reason == "inconsistent_stream"


def test_totals_of_other_choices_close_as_failed() -> None:
    """Readers keep a place for each choice that started, and for no other."""
    right = completed(A, 1, 1)
    for choices in ((0, 2), (0, 0), (-1, 0)):
        ends = tuple(ChoiceEnd(choice, 1, "stop") for choice in choices)
        state, _ = run(started(A, (0, 0)), tokens(A, 0, 1), tokens(A, 0, 1, choice=1), replace(right, choices=ends))
        assert state.closed is not None and state.closed.reason == "inconsistent_stream"


def test_a_timer_ends_only_what_nobody_has_touched() -> None:
    assert run(TIMER)[1] == [True]
    assert run(taken_over(A), TIMER)[1] == [True, True]
    assert run(started(A), TIMER)[1] == [True, False]
    assert run(started(A), tokens(A, 0, 1), taken_over(B), TIMER)[1] == [True, True, True, False]


def test_a_cancel_and_a_time_limit_end_always() -> None:
    limit = failed(None, "time_limit_exceeded", source="timer")
    for event in (CANCEL, limit):
        for before in ((), (started(A),), (started(A), tokens(A, 0, 1), taken_over(B))):
            state, _ = run(*before, event)
            assert state.closed is not None and state.closed.outcome == FAILED


def test_another_tenants_cancel_does_not_count() -> None:
    strange = replace(CANCEL, tenant="other")
    for before in ((started(A),), (taken_over(A),), (started(A), tokens(A, 0, 1))):
        state, counted = run(*before, strange, CANCEL)
        assert counted[-2:] == [False, True]
        assert state.tenant == "acme"
    assert run(started(A), replace(TIMER, tenant="other"), replace(failed(None), tenant="other"))[1] == [
        True,
        False,
        False,
    ]


def test_a_rejection_closes() -> None:
    state, counted = run(REJECTION, started(A), CANCEL)
    assert counted == [True, False, False]
    assert state.closed is not None and (state.closed.outcome, state.closed.reason) == (REJECTED, "model_not_found")


def test_a_refusal_of_what_a_worker_has_taken_up_changes_nothing() -> None:
    """One admission refused what another let in, and was late: the caller has the answer that began."""
    for begun in (started(A), taken_over(A)):
        state, counted = run(begun, REJECTION)
        assert counted == [True, False]
        assert state.closed is None
    state, counted = run(started(A), tokens(A, 0, 2), REJECTION, completed(A, 2))
    assert counted == [True, True, False, True]
    assert state.closed is not None and state.closed.outcome == COMPLETED


def test_what_is_taken_back_is_refused_before_a_worker_has_it_and_goes_on_after() -> None:
    taken_back = replace(TIMER, source="admission")
    state, counted = run(REJECTION, taken_back, started(A))
    assert (state.closed is not None and state.closed.outcome, counted) == (REJECTED, [True, False, False])
    state, counted = run(started(A), REJECTION, taken_back)
    assert (state.closed, counted) == (None, [True, False, False])


# --- properties: whatever owners, zombies, timers and cancels write, in whatever order --------------------------------

ATTEMPTS = st.sampled_from([A, B, C])
PLACES = st.integers(0, 6)
EVENTS: st.SearchStrategy[Input] = st.one_of(
    st.builds(started, ATTEMPTS, st.tuples(PLACES), st.sampled_from(["acme", "other"])),
    st.builds(taken_over, ATTEMPTS, st.sampled_from(["acme", "other"])),
    st.builds(released, ATTEMPTS),
    st.builds(tokens, ATTEMPTS, PLACES, st.integers(0, 3), st.integers(0, 1)),
    st.builds(tokens, ATTEMPTS, PLACES, st.integers(1, 3)),
    st.builds(completed, ATTEMPTS, PLACES),
    st.builds(failed, ATTEMPTS, totals=st.sampled_from([(), (2,)])),
    st.sampled_from([TIMER, CANCEL, replace(CANCEL, tenant="other"), REJECTION]),
)
LOGS = st.lists(EVENTS, max_size=40)
OPEN_LOGS = st.lists(
    st.one_of(
        st.builds(started, ATTEMPTS, st.just((0,))),
        st.builds(taken_over, ATTEMPTS),
        st.builds(released, ATTEMPTS),
        st.builds(tokens, ATTEMPTS, PLACES, st.integers(1, 3)),
    ),
    max_size=60,
)


def accepted_tokens(log: list[Input]) -> list[int]:
    state = NEW
    found: list[int] = []
    for event in log:
        state, counts = fold(state, event)
        if counts and isinstance(event, TokensGenerated):
            found.extend(event.token_ids)
    return found


@given(OPEN_LOGS)
def test_what_is_accepted_is_a_prefix_of_the_true_answer(log: list[Input]) -> None:
    found = accepted_tokens(log)
    assert found == list(range(len(found)))
    state, _ = run(*log)
    assert sum(state.accepted) == len(found)


@given(LOGS, LOGS)
def test_after_closing_nothing_counts(log: list[Input], late: list[Input]) -> None:
    state, _ = run(*log, CANCEL, replace(CANCEL, tenant="other"))
    assert state.closed is not None
    after, counted = run(*late, state=state)
    assert after == state and not any(counted)


@given(LOGS)
def test_a_record_that_comes_twice_in_a_row_counts_once(log: list[Input]) -> None:
    state = NEW
    for event in log:
        state, _ = fold(state, event)
        # A chunk of no tokens may count again: it adds nothing.
        if not (isinstance(event, TokensGenerated) and not event.token_ids):
            assert fold(state, event) == (state, False)
        else:
            assert fold(state, event)[0] == state


@given(LOGS)
def test_what_does_not_count_changes_nothing(log: list[Input]) -> None:
    state = NEW
    for event in log:
        after, counts = fold(state, event)
        assert counts or after == state
        state = after


@given(LOGS, LOGS)
def test_a_zombies_records_change_nothing(log: list[Input], zombie: list[Input]) -> None:
    """Leaving out every record of attempts below the present one doesn't change what follows."""
    state, _ = run(*log)
    if state.attempt is None or state.closed is not None:
        return
    for event in zombie:
        attempt = getattr(event, "attempt", None)
        if attempt is not None and attempt < state.attempt:
            assert fold(state, event) == (state, False)


@given(LOGS)
def test_progress_never_goes_back(log: list[Input]) -> None:
    state = NEW
    for event in log:
        after, _ = fold(state, event)
        assert sum(after.accepted) >= sum(state.accepted)
        assert after.failures >= state.failures
        assert state.attempt is None or (after.attempt is not None and after.attempt >= state.attempt)
        assert not state.tenant or after.tenant == state.tenant
        state = after
