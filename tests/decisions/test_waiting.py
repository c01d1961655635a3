from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.admission import check_deadline, check_wait
from decisions.cases import Case, Refusal
from decisions.placement import STALE_MS
from decisions.waiting import SILENT_REPORTS, Outlook, ended_ms, outlook, service_ms
from schemas.reasons import Reason
from tests.decisions.worlds import NOW, WORK, FakeWorld, Seen, case, worker


def seen(workers: list[Seen], ends: dict[int, int] | None = None, start_up_ms: int | None = None) -> Outlook:
    return outlook(WORK, workers, {(WORK, number): end for number, end in (ends or {}).items()}, NOW, start_up_ms)


def test_with_a_free_slot_there_is_no_wait() -> None:
    busy, free = worker("a", {0: 0}, slots=1, service_ms=9_000), worker("b", {1: 0}, slots=4, service_ms=9_000)
    assert seen([busy, free], {0: 5, 1: 3}) == Outlook(2, 4, 0, 5 / 9_000, free=1)


def test_so_many_have_begun_when_as_many_have_ended() -> None:
    pool = [worker("a", {0: 0}, slots=1, service_ms=500), worker("b", {1: 0}, slots=2, service_ms=1_000)]
    assert seen(pool).begun_ms(8) == 2_000
    assert seen([*pool, worker("c", {2: 0}, slots=1)]).begun_ms(8) == 2_000  # of one that doesn't tell nothing is hoped
    assert seen([worker("c", {2: 0}, slots=1)]).begun_ms(8) is None
    assert seen([], start_up_ms=7_000).begun_ms(8) == 7_000
    assert seen([]).begun_ms(8) is None


def test_how_long_a_request_runs_is_what_workers_tell_that_are_ready() -> None:
    told = [worker("a", {0: 0}, slots=1, service_ms=500), worker("b", {1: 0}, slots=2, service_ms=1_000)]
    silent = worker("c", {2: 0}, seen_ms=NOW - STALE_MS - 1, service_ms=9_000)
    assert service_ms([*told, silent, worker("d", {3: 0})], NOW) == 750
    assert service_ms([silent], NOW) == 0


@given(st.integers(1, 500), st.floats(0, 1e6), st.data())
def test_more_endings_take_longer_and_all_of_them_as_long_as_one_runs(
    running: int, each_ms: float, data: st.DataObject
) -> None:
    over = data.draw(st.integers(1, running))
    assert 0 <= ended_ms(running, over, each_ms) <= ended_ms(running, running, each_ms) <= each_ms + 1
    assert ended_ms(running + 1, over, each_ms) <= ended_ms(running, over, each_ms)


@given(st.integers(1, 64), st.integers(1, 500), st.floats(1, 10_000))
def test_more_take_longer_to_begin_and_fewer_with_more_slots(slots: int, count: int, service_ms: float) -> None:
    def begun(slots: int, count: int) -> int:
        found = seen([worker("a", {0: 0}, slots=slots, service_ms=service_ms)]).begun_ms(count)
        assert found is not None
        return found

    assert 0 < begun(slots, count) <= begun(slots, count + 1)
    assert begun(slots + 1, count) <= begun(slots, count)


def test_the_wait_is_what_must_end_before() -> None:
    """Four slots, six records: three of the six must end, and four end in a second."""
    assert seen([worker("a", {0: 10}, slots=4, service_ms=1_000)], {0: 16}) == Outlook(1, 2, 750, 0.004)


def test_of_several_workers_the_shortest_wait_counts() -> None:
    slow, fast = worker("a", {0: 0}, slots=1, service_ms=8_000), worker("b", {1: 0}, slots=1, service_ms=100)
    assert seen([slow, fast], {0: 1, 1: 3}).wait_ms == 300


def test_what_runs_for_another_tier_is_in_the_way() -> None:
    assert seen([worker("a", {0: 0}, slots=2, running=2, service_ms=1_000)]).wait_ms == 500


def test_without_a_measured_time_nothing_is_predicted() -> None:
    assert seen([worker("a", {0: 0}, slots=1)], {0: 50}) == Outlook(1, 49, None)


def test_without_a_ready_worker_it_is_the_start_of_one() -> None:
    gone = worker("a", {0: 0}, seen_ms=NOW - SILENT_REPORTS * STALE_MS - 1, service_ms=1)
    assert seen([gone]) == Outlook(0, 0, None)
    assert seen([gone], start_up_ms=60_000).wait_ms == 60_000
    starting = worker("b", {}, state="starting", started_ms=NOW - 45_000)
    late = worker("c", {}, state="starting", started_ms=NOW - 5_000)
    assert seen([gone, late, starting], start_up_ms=60_000).wait_ms == 15_000
    assert seen([worker("b", {}, state="starting", started_ms=NOW - 90_000)], start_up_ms=60_000).wait_ms == 0


def test_a_worker_that_has_just_fallen_silent_may_live() -> None:
    """The log may have been away; nobody is told that there is none before it had time to report."""
    silent = worker("a", {0: 0}, seen_ms=NOW - STALE_MS - 1, service_ms=1)
    assert seen([silent], start_up_ms=60_000) == Outlook(0, 0, None)


def test_what_has_ended_since_the_report_is_gone() -> None:
    old = worker("a", {0: 0}, slots=4, service_ms=50, seen_ms=NOW - 900)
    assert seen([old], {0: 72}) == Outlook(1, 0, 0, 0.08, free=4)
    assert seen([worker("a", {0: 0}, slots=4, running=4, service_ms=50, seen_ms=NOW - 900)], {0: 72}).wait_ms == 13


@given(st.integers(1, 64), st.integers(0, 500), st.floats(1, 10_000))
def test_the_wait_grows_with_what_is_there_and_falls_with_slots(slots: int, records: int, service_ms: float) -> None:
    def wait(slots: int, records: int) -> int:
        found = seen([worker("a", {0: 0}, slots=slots, service_ms=service_ms)], {0: records}).wait_ms
        assert found is not None
        return found

    assert wait(slots, records) <= wait(slots, records + 1)
    assert wait(slots + 1, records) <= wait(slots, records)
    assert (wait(slots, records) == 0) == (records < slots)


# --- the check -------------------------------------------------------------------------------------------------------


def checked(world: FakeWorld, timeout_ms: int = 5_000, **version: Any) -> Case | Refusal:
    asked = case()
    routed = replace(world.models["m"], **version)
    found = check_deadline(replace(asked, version=routed, request=replace(asked.request, timeout_ms=timeout_ms)), world)
    assert isinstance(found, Case)
    return check_wait(found, world)


def world(records: int, service_ms: float = 1_000) -> FakeWorld:
    return FakeWorld(seen=[worker("a", {0: 0}, slots=1, service_ms=service_ms)], ends={(WORK, 0): records})


def test_who_cant_be_served_in_time_is_told_at_once_and_when_to_come_again() -> None:
    refusal = checked(world(10))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.param, refusal.retry_after_ms) == (Reason.OVERLOADED, "timeout", 5_000)
    assert "10000 ms" in refusal.message


def test_who_has_time_waits_and_the_estimate_is_kept() -> None:
    found = checked(world(3))
    assert isinstance(found, Case)
    assert found.decisions[-1].check == "wait"
    assert found.decisions[-1].detail == "1 workers ready, 2 waiting, predicted wait 3000 ms"


@pytest.mark.parametrize(("start_up_ms", "admitted"), [(None, True), (4_000, True), (60_000, False)])
def test_a_pool_at_zero_takes_what_outlives_its_start(start_up_ms: int | None, admitted: bool) -> None:
    found = checked(FakeWorld(start_up=start_up_ms))
    assert isinstance(found, Case) == admitted
    if isinstance(found, Refusal):
        assert (found.reason, found.retry_after_ms) == (Reason.NO_WORKER, 55_000)


def test_a_long_queue_is_in_nobodys_way_who_finds_a_free_worker() -> None:
    two = FakeWorld(
        seen=[worker("a", {0: 0}, slots=1, service_ms=1_000), worker("b", {1: 0}, slots=1)], ends={(WORK, 0): 30}
    )
    assert isinstance(checked(two, max_queue_depth={"interactive": 10}), Case)


def test_a_queue_has_its_depth_by_tier() -> None:
    assert isinstance(checked(world(3), 100_000, max_queue_depth={"interactive": 3}), Case)
    refusal = checked(world(4), 100_000, max_queue_depth={"interactive": 3, "batch": 9})
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.param, refusal.retry_after_ms) == (Reason.OVERLOADED, "model", 1_000)
    assert isinstance(checked(world(4), 100_000, max_queue_depth={"batch": 1}), Case)


def test_who_has_waited_in_a_queue_is_not_told_that_it_is_full() -> None:
    world_then, depth = world(4), {"interactive": 3}
    late = checked(world_then, 100_000, max_queue_depth=depth)
    assert isinstance(late, Refusal)
    routed = replace(world_then.models["m"], max_queue_depth=depth)
    waited = replace(case(), version=routed, deadline_ms=NOW + 100_000, placed=True)
    assert isinstance(check_wait(waited, world_then), Case)


def test_who_finds_a_queue_too_deep_is_told_when_there_is_room() -> None:
    slow = checked(world(10, service_ms=3_000), 100_000, max_queue_depth={"interactive": 4})
    assert isinstance(slow, Refusal)
    assert (slow.param, slow.retry_after_ms) == ("model", 6 * 3_000)  # nine wait, and three may beside it
    starting = checked(FakeWorld(waits=9, start_up=20_000), 100_000, max_queue_depth={"interactive": 4})
    assert isinstance(starting, Refusal)
    assert (starting.param, starting.retry_after_ms) == ("model", 20_000)
    unknown = checked(FakeWorld(waits=9), 100_000, max_queue_depth={"interactive": 4})
    assert isinstance(unknown, Refusal)
    assert (unknown.param, unknown.retry_after_ms) == ("model", 1_000)


@pytest.mark.parametrize("workers", [[], [worker("b", {}, state="starting", started_ms=NOW - 90_000)]])
def test_a_queue_has_its_depth_where_no_worker_is_ready(workers: list[Seen]) -> None:
    depth = {"interactive": 3}
    assert isinstance(checked(FakeWorld(seen=workers, waits=2), 100_000, max_queue_depth=depth), Case)
    refusal = checked(FakeWorld(seen=workers, waits=3, start_up=1_000), 100_000, max_queue_depth=depth)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.param) == (Reason.OVERLOADED, "model")
    assert isinstance(checked(FakeWorld(seen=workers, waits=9), 100_000, max_queue_depth={"batch": 1}), Case)


def test_a_pool_of_another_tier_is_nobodys_worker_here() -> None:
    idle = worker("b", {}, slots=8, tiers=("batch",))
    alone = checked(FakeWorld(seen=[idle], start_up=60_000))
    assert isinstance(alone, Refusal)
    assert (alone.reason, alone.retry_after_ms) == (Reason.NO_WORKER, 55_000)

    own = worker("a", {0: 0}, slots=1, service_ms=1_000, tiers=("interactive",))
    beside = FakeWorld(seen=[own, idle], ends={(WORK, 0): 10})
    late, many = checked(beside), checked(beside, 100_000, max_queue_depth={"interactive": 3})
    assert isinstance(late, Refusal)
    assert isinstance(many, Refusal)
    assert (late.reason, late.retry_after_ms) == (Reason.OVERLOADED, 5_000)
    assert (many.reason, many.param) == (Reason.OVERLOADED, "model")
