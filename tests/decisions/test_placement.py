from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from decisions.placement import STALE_MS, place
from tests.decisions.worlds import NOW, WORK, Seen, worker


def chosen(workers: list[Seen], ends: dict[int, int] | None = None, request_id: str = "r", **how: Any) -> int:
    known = {(WORK, partition): end for partition, end in (ends or {}).items()}
    return place(request_id, WORK, 4, workers, known, how.get("now_ms", NOW)).partition


def test_the_worker_with_the_least_to_do_a_slot_gets_it() -> None:
    busy, idle = worker("a", {0: 0, 1: 0}), worker("b", {2: 0, 3: 0})
    assert chosen([busy, idle], {0: 2, 1: 1, 2: 0, 3: 1}) == 2


def test_slots_count() -> None:
    small, large = worker("a", {0: 0}, slots=1), worker("b", {1: 0}, slots=8)
    assert chosen([small, large], {0: 1, 1: 4}) == 1


def test_of_one_workers_partitions_the_shorter_gets_it() -> None:
    assert chosen([worker("a", {0: 10, 1: 10})], {0: 15, 1: 12}) == 1


def test_what_runs_for_other_tiers_counts() -> None:
    assert chosen([worker("a", {0: 0}, running=4), worker("b", {1: 0}, running=1)]) == 1


def test_what_runs_of_the_same_tier_counts_once() -> None:
    """The backlog holds what runs: two records of which two run aren't more than three that wait."""
    assert chosen([worker("a", {0: 0}, running=2), worker("b", {1: 0})], {0: 2, 1: 3}) == 0


def test_workers_that_are_not_ready_or_silent_get_nothing() -> None:
    gone = [
        worker("a", {0: 0}, state="draining"),
        worker("b", {1: 0}, state="starting"),
        worker("c", {2: 0}, seen_ms=NOW - STALE_MS - 1),
    ]
    assert {chosen([*gone, worker("d", {3: 0})], {3: 100}, request_id=f"r{i}") for i in range(50)} == {3}


def test_a_report_just_newer_than_the_request_is_believed() -> None:
    assert chosen([worker("a", {2: 0}, seen_ms=NOW + 500)]) == 2


def test_a_partition_that_nobody_reports_comes_last() -> None:
    assert {chosen([worker("a", {1: 0})], {1: 1_000}, request_id=f"r{i}") for i in range(50)} == {1}


def test_without_workers_requests_spread_by_their_ids() -> None:
    counts = Counter(chosen([], request_id=f"r{i}") for i in range(400))
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 60


def test_ties_spread_and_are_stable() -> None:
    workers = [worker("a", {0: 0, 1: 0}), worker("b", {2: 0, 3: 0})]
    counts = Counter(chosen(workers, request_id=f"r{i}") for i in range(400))
    assert set(counts) == {0, 1, 2, 3}
    assert chosen(workers, request_id="r7") == chosen(workers[::-1], request_id="r7")


def test_a_report_of_another_topic_or_a_partition_that_is_gone_is_no_choice() -> None:
    assert {
        chosen([worker("a", {9: 0}), worker("b", {0: 0}, topic="work.m.v1.batch")], request_id=f"r{i}")
        for i in range(99)
    } == {0, 1, 2, 3}


@given(
    st.lists(
        st.tuples(st.dictionaries(st.integers(0, 5), st.integers(0, 9)), st.integers(0, 4), st.integers(0, 9)),
        max_size=4,
    ),
    st.dictionaries(st.integers(0, 5), st.integers(0, 20)),
    st.integers(1, 4),
    st.text(max_size=8),
)
def test_the_partition_exists_and_is_one_of_a_ready_worker(
    given_workers: list[tuple[dict[int, int], int, int]], ends: dict[int, int], partitions: int, request_id: str
) -> None:
    workers = [
        worker(f"w{i}", held, slots=slots, running=running) for i, (held, slots, running) in enumerate(given_workers)
    ]
    known = {(WORK, partition): end for partition, end in ends.items()}
    found = place(request_id, WORK, partitions, workers, known, NOW).partition
    assert 0 <= found < partitions
    reported = {partition for held, _, _ in given_workers for partition in held if partition < partitions}
    assert not reported or found in reported
