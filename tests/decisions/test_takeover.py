"""What a new owner does, given the stream up to its marker."""

from __future__ import annotations

from typing import Any

import pytest

from decisions.takeover import FAILURES_MAX, Action, Plan, Reading, decide
from decisions.window import Standing
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    Sampling,
    Timings,
    TokensGenerated,
    Usage,
)

WHO = ("r", "acme", "m", "1", "interactive")
A, B, C = Attempt(1, 1), Attempt(2, 1), Attempt(3, 1)
GREEDY = Sampling(max_tokens=100, temperature=0.0)


def started(attempt: Attempt, *from_tokens: int) -> GenerationStarted:
    return GenerationStarted(*WHO, attempt, from_tokens or (0,), 3, "w")


def tokens(attempt: Attempt, first: int, *ids: int, choice: int = 0) -> TokensGenerated:
    return TokensGenerated("r", choice, attempt, first, ids, "")


def marker(attempt: Attempt) -> GenerationTakenOver:
    return GenerationTakenOver(*WHO, attempt, "w")


def completed(attempt: Attempt, total: int) -> InferenceCompleted:
    return InferenceCompleted(*WHO, attempt, (ChoiceEnd(0, total, "stop"),), Usage(3, total), Timings(), "w")


def reading(*events: Any) -> Reading:
    found = Reading()
    for event in events:
        found.apply(event)
    return found


def plan(*events: Any, attempt: Attempt = B, sampling: Sampling = GREEDY) -> Plan:
    return decide(reading(*events), attempt, sampling)


def test_nobody_had_started_it() -> None:
    assert plan(marker(B)) == Plan(Action.RUN, ((),))


def test_nobody_had_started_any_choice() -> None:
    assert plan(marker(B), sampling=Sampling(n=3)).accepted == ((), (), ())


def test_it_goes_on_from_what_was_accepted() -> None:
    found = plan(started(A), tokens(A, 0, 5, 6), tokens(A, 2, 7), marker(B))
    assert found == Plan(Action.RUN, ((5, 6, 7),), standing=Standing.BEGUN)
    assert found.totals == (3,)


def test_what_did_not_count_is_not_gone_on_from() -> None:
    other = Attempt(1, 9)
    found = plan(
        started(A), tokens(A, 0, 5), tokens(other, 1, 99), tokens(A, 0, 5), tokens(A, 7, 1), marker(B), tokens(A, 1, 98)
    )
    assert found.accepted == ((5,),)


def test_choices_are_kept_apart() -> None:
    found = plan(started(A, 0, 0), tokens(A, 0, 1, choice=1), tokens(A, 0, 2, choice=0), marker(B))
    assert found.accepted == ((2,), (1,))


def test_tokens_of_several_owners_are_one_answer() -> None:
    events = [started(A), tokens(A, 0, 1), marker(B), started(B, 1), tokens(B, 1, 2), marker(C)]
    assert plan(*events, attempt=C).accepted == ((1, 2),)


def test_an_ended_request_is_skipped() -> None:
    assert plan(started(A), tokens(A, 0, 5), completed(A, 1), marker(B)).action is Action.SKIP
    cancelled = InferenceFailed(*WHO, "cancelled", "", source="cancel")
    assert plan(cancelled, marker(B)).action is Action.SKIP


def test_an_ending_that_came_after_the_marker_does_not_count() -> None:
    assert plan(started(A), tokens(A, 0, 5), marker(B), completed(A, 1)).action is Action.RUN


def test_a_newer_owner_is_left_alone() -> None:
    assert plan(started(A), marker(C), marker(B)).action is Action.LEAVE


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(frequency_penalty=0.1),
        Sampling(presence_penalty=-0.1),
        Sampling(repetition_penalty=1.1),
        Sampling(seed=7, temperature=0.5),
    ],
)
def test_what_cannot_be_continued_exactly_is_lost_once_it_has_tokens(sampling: Sampling) -> None:
    assert plan(started(A), tokens(A, 0, 5), marker(B), sampling=sampling).action is Action.LOST
    assert plan(started(A), marker(B), sampling=sampling).action is Action.RUN


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(seed=7, temperature=0.0), Sampling(min_tokens=50), Sampling(top_k=5)]
)
def test_the_rest_can_be_continued(sampling: Sampling) -> None:
    assert plan(started(A), tokens(A, 0, 5), marker(B), sampling=sampling).action is Action.RUN


def failed_times(count: int) -> list[Any]:
    events: list[Any] = []
    for generation in range(1, count + 1):
        attempt = Attempt(generation, 1)
        events += [marker(attempt)] if generation > 1 else []
        events.append(started(attempt))
    return [*events, marker(Attempt(count + 1, 1))]


def test_the_third_owner_that_dies_makes_it_poisonous() -> None:
    for count in range(FAILURES_MAX + 1):
        found = plan(*failed_times(count), attempt=Attempt(count + 1, 1))
        assert found.action is (Action.POISONED if count >= FAILURES_MAX else Action.RUN)


def test_a_released_attempt_is_no_failure() -> None:
    events: list[Any] = []
    for generation in range(1, 6):
        attempt = Attempt(generation, 1)
        events += [marker(attempt), started(attempt), GenerationReleased("r", attempt, "w")]
    assert plan(*events, marker(Attempt(6, 1)), attempt=Attempt(6, 1)).action is Action.RUN
