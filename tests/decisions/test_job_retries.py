"""What an error of a batch job's request leads to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.job_retries import FAILED_MAX, REFUSED_MAX, Then, Verdict, verdict
from decisions.jobs import TRIES_MAX, Tries
from schemas.reasons import Reason

R = Reason


@pytest.mark.parametrize(
    ("reason", "retry_after_ms", "lines", "then"),
    [
        (R.RATE_LIMITED, None, 1, Then.LAST),
        (R.RATE_LIMITED, None, 5, Then.SPLIT),  # each by itself may have room
        (R.RATE_LIMITED, 10, 5, Then.AGAIN),
        (R.OVERLOADED, None, 1, Then.AGAIN),
        (R.WORKER_LOST, None, 1, Then.AGAIN),
        (R.DEADLINE_EXCEEDED, None, 5, Then.SPLIT),  # what is too short for all may be long enough for each
        (R.DEADLINE_EXCEEDED, None, 1, Then.LAST),
        (R.TIME_LIMIT_EXCEEDED, None, 5, Then.SPLIT),  # it is one of them that takes so long
        (R.TIME_LIMIT_EXCEEDED, None, 1, Then.LAST),
        (R.ENGINE_ERROR, None, 5, Then.SPLIT),
        (R.ENGINE_ERROR, None, 1, Then.LAST),
        (R.MODEL_NOT_FOUND, None, 5, Then.LAST),
        (R.GRANT_EXPIRED, None, 5, Then.STOP),
    ],
)
def test_what_follows_an_error(reason: Reason, retry_after_ms: int | None, lines: int, then: Then) -> None:
    assert verdict(reason, retry_after_ms, Tries(), lines).then is then


def test_a_limit_is_waited_for_as_long_as_it_says_and_that_is_no_failed_try() -> None:
    assert verdict(R.RATE_LIMITED, 90_000, Tries(), 1) == Verdict(Then.AGAIN, 90.0, 90.0)
    assert verdict(R.RATE_LIMITED, 90_000, Tries(250, REFUSED_MAX, FAILED_MAX), 1).then is Then.AGAIN


def test_a_limit_that_never_has_room_holds_nothing_up() -> None:
    assert verdict(R.RATE_LIMITED, None, Tries(), 1) == Verdict(Then.LAST)


def test_refusals_and_failures_are_counted_apart() -> None:
    often_refused = Tries(20, 20)
    found = verdict(R.WORKER_LOST, None, often_refused, 1)
    assert (found.then, found.refused, found.failed, found.all_wait_s) == (Then.AGAIN, 0, 1, 0.0)
    assert verdict(R.OVERLOADED, None, Tries(FAILED_MAX, 0, FAILED_MAX), 1).then is Then.AGAIN
    assert verdict(R.WORKER_LOST, None, Tries(FAILED_MAX, 0, FAILED_MAX), 1).then is Then.LAST
    assert verdict(R.OVERLOADED, None, Tries(REFUSED_MAX, REFUSED_MAX), 1).then is Then.LAST


@given(st.sampled_from(list(Reason)), st.one_of(st.none(), st.integers(1, 10**7)), st.integers(1, 64))
def test_every_request_comes_to_an_end_before_its_ids_do(
    reason: Reason, retry_after_ms: int | None, lines: int
) -> None:
    tries = Tries()
    while (found := verdict(reason, retry_after_ms, tries, lines)).then in (Then.AGAIN, Then.STOP):
        tries = Tries(tries.asked + 1, tries.refused + found.refused, tries.failed + found.failed)
        assert tries.asked < TRIES_MAX
        assert found.wait_s >= found.all_wait_s >= 0
