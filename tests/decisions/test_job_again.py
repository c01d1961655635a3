"""Which lines of a finished batch job are asked again."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from decisions.job_again import among, asked_again, in_order, ranges_of
from decisions.jobs import Done, Job

NUMBERS = st.sets(st.integers(1, 200))


@given(NUMBERS)
def test_ranges_hold_exactly_their_numbers_and_no_two_of_them_touch(numbers: set[int]) -> None:
    ranges = ranges_of(numbers)
    assert {number for number in range(202) if among(number, ranges)} == numbers
    assert all(one[1] + 1 < other[0] for one, other in itertools.pairwise(ranges))


@given(NUMBERS, NUMBERS)
def test_what_was_asked_again_takes_its_place(numbers: set[int], again: set[int]) -> None:
    kept = iter([(number, "kept") for number in sorted(numbers - again)])
    new = iter([(number, "new") for number in sorted(numbers & again)])
    found = list(in_order(sorted(numbers), ranges_of(numbers & again), kept, new))
    assert found == [(number, "new" if number in again else "kept") for number in sorted(numbers)]


def test_a_job_asked_again_has_its_errors_left_to_do_and_ids_of_its_own() -> None:
    job = Job(
        1,
        "seed",
        "digest",
        {"model": "m"},
        10,
        {"m": ("v1", "form")},
        100,
        {0: 7},
        3,
        Done(3),
        set(),
        {},
        6,
        4,
        "acme",
        "cluster",
        2,
        9,
        Counter({"overloaded": 2, "engine_error": 1, "worker_lost": 1}),
    )
    assert job.may_pass == 3
    again = asked_again(job, 2, "other", [4, 5, 9])
    assert (again.lines, again.done, again.failed, again.earlier, again.only) == (10, 6, 1, 7, [(4, 5), (9, 9)])
    assert not again.finished
    assert again.reasons == {"engine_error": 1}
    assert (again.may_pass, again.asked, again.positions, again.units, again.repeats) == (0, 0, {}, Done(), 0)
    assert again.claim("other", "cluster") is not None
    assert again.prefix != job.prefix
    assert Job.from_json(again.to_json()) == again
