from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.turnstile import TENANTS_MIN, Pool, opens, pool, share
from schemas.events import ModelVersionRegistered
from schemas.topics import BATCH, SHADOW
from tests.decisions.worlds import NOW, WORK, Seen, worker

VERSION = ModelVersionRegistered("m", "v1", "scripted", "", 100, partitions=4, slots=8)


def seen(*workers: Seen, ends: dict[int, int] | None = None, tier: str = "interactive") -> Pool:
    topic = WORK.replace("interactive", tier)
    places = {(topic, partition): end for partition, end in (ends or {}).items()}
    return pool(VERSION, tier, workers, places, NOW)


def test_a_pool_is_the_windows_of_all_partitions_that_its_workers_hold_and_what_is_unfinished_there() -> None:
    two = (worker("a", {0: 10, 1: 10}), worker("b", {2: 10, 3: 10}))
    assert seen(*two, ends={0: 12, 1: 10, 2: 15}) == Pool(4 * 64, 2 + 5)


def test_who_is_silent_or_leaves_has_no_window() -> None:
    ready = worker("a", {0: 0})
    assert seen(ready, worker("b", {1: 0}, state="draining"), worker("c", {2: 0}, seen_ms=NOW - 60_000)).window == 64


def test_without_a_worker_the_pool_is_the_first_ones_to_come() -> None:
    assert seen(ends={0: 1_000_000}) == Pool(4 * 64, 0)


@pytest.mark.parametrize(
    ("tenants", "percent", "most"), [(1, 0, 192), (2, 0, 64), (4, 0, 64), (8, 0, 32), (8, 50, 128), (500, 0, 1)]
)
def test_a_tenant_has_a_part_of_the_windows(tenants: int, percent: int, most: int) -> None:
    assert share(256, tenants, percent) == most


@pytest.mark.parametrize("tier", [BATCH, SHADOW])
def test_live_traffic_waits_for_no_other_but_other_tiers_stay_in_the_log_when_their_windows_are_full(tier: str) -> None:
    full = Pool(64, 64)
    assert opens("interactive", full, 0, 3)
    assert not opens(tier, full, 0, 3)
    assert opens(tier, Pool(64, 63), 0, 3)


@given(
    arrivals=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 80)), max_size=20),
    begun=st.lists(st.integers(0, 99), max_size=60),
)
def test_however_one_floods_whoever_comes_later_finds_a_place_within_the_windows(
    arrivals: list[tuple[str, int]], begun: list[int]
) -> None:
    """Fewer tenants than a window has parts: together they never have more there than it holds."""
    queue, window, at = list[str](), 64, 0
    for tenant, count in arrivals:
        for _ in range(count):
            queued = Counter(queue)
            others = len({*queued, tenant})
            if opens("interactive", Pool(window, len(queue)), queued[tenant], others):
                queue.append(tenant)
            if at < len(begun) and queue:
                queue.pop(begun[at] % len(queue))
                at += 1
        # Who came while it was alone may have three quarters; all others, a quarter each or less.
        assert all(count <= 3 * window // 4 for count in Counter(queue).values())
        newcomer = "z"
        assert opens("interactive", Pool(window, len(queue)), 0, len({*queue, newcomer}))
        if len(set(queue)) <= 1:
            assert len(queue) < window


@given(st.integers(1, 10_000), st.integers(2, 50))
def test_the_parts_of_all_tenants_fit_into_the_windows(window: int, tenants: int) -> None:
    part = share(window, tenants)
    assert part == 1 or part * max(tenants, TENANTS_MIN) <= window
