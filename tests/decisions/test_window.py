"""The window: never past unfinished work, never further than its size from the last confirmed commit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.window import (
    PASSED_MAX,
    Room,
    Standing,
    Waiting,
    Window,
    choose,
    confirm,
    expired,
    finish,
    guest_slots,
    interactive_slots,
    pass_over,
    room,
    take,
    window_records,
)

RECORDS = 8
BYTES = 1_000

Action = tuple[str, int]
ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "finish", "commit"]), st.integers(0, 1_000)), max_size=200)


@given(start=st.integers(0, 50), actions=ACTIONS, gaps=st.sets(st.integers(0, 200)))
def test_no_completion_order_commits_past_unfinished_work(start: int, actions: list[Action], gaps: set[int]) -> None:
    window, unfinished, taken = Window.at(start), set[int](), set[int]()
    for kind, number in actions:
        if kind == "take" and room(window, RECORDS, BYTES):
            offset = window.next
            while offset in gaps:
                offset += 1
            window = take(window, offset, 1)
            unfinished.add(offset)
            taken.add(offset)
        elif kind == "finish" and unfinished:
            offset = sorted(unfinished)[number % len(unfinished)]
            window = finish(window, offset)
            unfinished.discard(offset)
        elif kind == "commit":
            window = confirm(window, window.committable)
        assert all(window.committable <= offset for offset in unfinished)
        assert all(offset in unfinished or offset < window.next for offset in taken)
        assert window.committed <= window.committable <= window.next
        assert set(window.open) == unfinished
        assert window.finished_above >= 0


@given(start=st.integers(0, 50), actions=ACTIONS)
def test_a_record_is_taken_only_within_the_window(start: int, actions: list[Action]) -> None:
    window, confirmed, pending = Window.at(start), start, start
    for kind, number in actions:
        if kind == "take" and room(window, RECORDS, BYTES):
            window = take(window, window.next, 1)
            assert window.next - 1 < confirmed + RECORDS
        elif kind == "finish" and window.open:
            window = finish(window, sorted(window.open)[number % len(window.open)])
        elif kind == "commit" and number % 2:
            pending = window.committable  # asked for, not yet confirmed
        elif kind == "commit":
            window = confirm(window, pending)
            confirmed = max(confirmed, pending)


def test_everything_finished_is_committed() -> None:
    window = Window.at(5)
    for offset in (5, 6, 9):
        window = take(window, offset, 1)
    for offset in (9, 5):
        window = finish(window, offset)
    assert (window.committable, window.finished_above) == (6, 4)  # 7 and 8 are not in the log
    window = finish(window, 6)
    assert window.committable == 10
    assert confirm(window, 10).finished_above == 0


def test_finishing_twice_or_something_foreign_changes_nothing() -> None:
    window = finish(take(Window.at(0), 0, 1), 0)
    assert finish(window, 0) == window
    assert finish(window, 77) == window


def test_taking_twice_or_committing_too_far_is_refused() -> None:
    window = take(Window.at(0), 0, 1)
    with pytest.raises(ValueError, match="taken before"):
        take(window, 0, 1)
    with pytest.raises(ValueError, match="lowest unfinished"):
        confirm(window, 1)


def test_what_cannot_be_read_is_passed_over_and_what_is_open_before_it_stays() -> None:
    window = take(Window.at(3), 3, 10)
    assert pass_over(window, 7).committable == 3
    assert pass_over(finish(window, 3), 7).committable == 7
    assert pass_over(window, 2) == window


def test_an_old_confirmation_does_not_move_the_window_back() -> None:
    window = finish(take(Window.at(0), 0, 1), 0)
    assert confirm(confirm(window, 1), 0).committed == 1


def test_bytes_close_a_window_but_never_an_empty_one() -> None:
    window = Window.at(0)
    assert room(window, RECORDS, 10) == RECORDS
    window = take(window, 0, 50)
    assert room(window, RECORDS, 10) == 0
    assert room(finish(window, 0), RECORDS, 10) == RECORDS - 1


def test_a_window_holds_more_records_than_there_are_slots() -> None:
    assert window_records(64, 8) == 64
    assert window_records(64, 256) == 512
    assert window_records(0, 0) == 1


BEGUN, SUSPECT, FRESH = Standing.BEGUN, Standing.SUSPECT, Standing.FRESH


def waiting(
    tier: str = "interactive", tenant: str = "a", deadline_ms: int = 1_000, taken: int = 0, standing: Standing = FRESH
) -> Waiting:
    return Waiting(tier, tenant, deadline_ms, taken, standing)


def running(**by_tenant: int) -> list[Waiting]:
    return [waiting(tenant=tenant) for tenant, count in by_tenant.items() for _ in range(count)]


@pytest.mark.parametrize(
    ("records", "under_way", "chosen"),
    [
        ([], [], None),
        ([waiting("batch", deadline_ms=1), waiting("interactive", deadline_ms=9)], [], 1),
        ([waiting("shadow"), waiting("batch")], [], 1),
        ([waiting("elsewhere"), waiting("shadow")], [], 1),
        ([waiting(tenant="a", deadline_ms=1), waiting(tenant="b", deadline_ms=9)], running(a=2, b=1), 1),
        ([waiting(deadline_ms=9), waiting(deadline_ms=1)], running(a=2), 1),
        # What a tenant runs in another tier is no part of its share in this one.
        ([waiting(tenant="a", deadline_ms=1), waiting(tenant="b", deadline_ms=9)], [waiting("batch", "a")] * 9, 0),
        ([waiting(taken=2), waiting(taken=1)], [], 1),
        ([waiting("interactive", "a"), waiting("batch", "b")], running(a=100), 0),
        ([waiting(tenant="b"), waiting(tenant="a", standing=BEGUN)], running(a=100), 1),
        ([waiting("batch", standing=BEGUN), waiting("interactive")], [], 1),
    ],
)
def test_choice_is_by_tier_then_standing_then_share_then_deadline_then_order(
    records: list[Waiting], under_way: list[Waiting], chosen: int | None
) -> None:
    assert choose(records, under_way) == chosen


@pytest.mark.parametrize(
    ("records", "under_way", "chosen"),
    [
        # It waits until what runs has ended, and meanwhile holds fresh work back.
        ([waiting(), waiting(standing=SUSPECT)], [], 1),
        ([waiting(), waiting(standing=SUSPECT)], running(b=1), None),
        # While it runs nothing else begins, of whatever tier.
        ([waiting()], [waiting(standing=SUSPECT)], None),
        ([waiting()], [waiting("batch", standing=SUSPECT)], None),
        ([waiting(standing=BEGUN), waiting(standing=SUSPECT)], [waiting(standing=SUSPECT)], None),
        # What may run beside others goes first.
        ([waiting(standing=SUSPECT), waiting(standing=BEGUN)], running(b=1), 1),
        # So does a higher tier, up to a limit.
        ([waiting("batch", standing=SUSPECT), waiting(taken=PASSED_MAX - 1)], running(b=1), 1),
        ([waiting("batch", standing=SUSPECT), waiting(taken=PASSED_MAX)], running(b=1), None),
        ([waiting("batch", standing=SUSPECT), waiting(taken=PASSED_MAX)], [], 0),
        ([waiting(taken=PASSED_MAX, standing=BEGUN), waiting(standing=SUSPECT)], [], 1),
    ],
)
def test_a_suspect_runs_alone(records: list[Waiting], under_way: list[Waiting], chosen: int | None) -> None:
    assert choose(records, under_way) == chosen


RECORD = st.builds(
    waiting,
    st.sampled_from(["interactive", "batch"]),
    st.sampled_from(["a", "b"]),
    st.integers(0, 9),
    st.just(0),
    st.sampled_from([FRESH, FRESH, BEGUN, SUSPECT]),
)


@given(arrivals=st.lists(st.lists(RECORD, max_size=4), max_size=30), ends=st.lists(st.integers(0, 99), max_size=30))
def test_a_suspect_is_always_alone_and_an_idle_worker_always_begins(
    arrivals: list[list[Waiting]], ends: list[int]
) -> None:
    queue, under_way, taken = list[Waiting](), list[Waiting](), 0
    for turn in range(max(len(arrivals), len(ends))):
        for record in arrivals[turn] if turn < len(arrivals) else ():
            taken += 1
            queue.append(replace(record, taken=taken))
        while len(under_way) < 3 and (index := choose(queue, under_way)) is not None:
            under_way.append(queue.pop(index))
        assert under_way or not queue
        assert len(under_way) == 1 or all(record.standing is not SUSPECT for record in under_way)
        if not any(record.standing is SUSPECT for record in (*queue, *under_way)):
            assert len(under_way) == 3 or not queue
        if under_way and turn < len(ends):
            under_way.pop(ends[turn] % len(under_way))


@given(standings=st.lists(st.sampled_from([FRESH, BEGUN]), min_size=1, max_size=20), slots=st.integers(1, 8))
def test_however_much_comes_of_a_higher_tier_a_suspect_gets_its_turn(standings: list[Standing], slots: int) -> None:
    queue, under_way, taken, begun = [waiting("batch", standing=SUSPECT)], list[Waiting](), 0, 0
    while under_way[:1] != [waiting("batch", standing=SUSPECT)]:
        taken += 1
        queue.append(waiting(taken=taken, standing=standings[taken % len(standings)]))
        while len(under_way) < slots and (index := choose(queue, under_way)) is not None:
            under_way.append(queue.pop(index))
            begun += 1
        if taken % 2:
            under_way = under_way[1:]
        assert begun <= PASSED_MAX + 1


@pytest.mark.parametrize(
    ("records", "under_way", "room", "chosen"),
    [
        # One slot of four is interactive's alone: batch has the other three.
        ([waiting("batch")], [waiting("batch")] * 2, Room(4, 1), 0),
        ([waiting("batch")], [waiting("batch")] * 3, Room(4, 1), None),
        ([waiting("shadow")], [waiting("batch")] * 3, Room(4, 1), None),
        ([waiting("batch"), waiting()], [waiting("batch")] * 3, Room(4, 1), 1),
        ([waiting("batch")], running(a=3), Room(4, 1), 0),
        # An answer that was begun elsewhere goes on at once.
        ([waiting("batch", standing=BEGUN)], [waiting("batch")] * 3, Room(4, 1), 0),
        # What is promised to gold is left free by others, and gold finds it.
        ([waiting(tenant="a")], running(a=2), Room(4, guaranteed={("interactive", "gold"): 2}), None),
        (
            [waiting(tenant="a"), waiting(tenant="gold")],
            running(a=2),
            Room(4, guaranteed={("interactive", "gold"): 2}),
            1,
        ),
        ([waiting(tenant="a")], running(a=2, gold=2), Room(5, guaranteed={("interactive", "gold"): 2}), 0),
        ([waiting(tenant="gold")], running(gold=3), Room(4, guaranteed={("interactive", "gold"): 2}), 0),
        # When all are taken, only a newcomer's live call finds a guest's slot.
        ([waiting(tenant="a"), waiting("batch", "new"), waiting(tenant="new")], running(a=8), Room(8, 1, 1), 2),
        ([waiting(tenant="a"), waiting(tenant="b")], running(a=7, b=1), Room(8, 1, 1), None),
        ([waiting(tenant="a", standing=BEGUN)], running(a=8), Room(8, 1, 1), None),
        ([waiting(tenant="a")], running(a=2), Room(8, 1, 1, used=8), None),
        # A promise is of one tier.
        ([waiting("batch", "gold")], running(a=2), Room(4, guaranteed={("interactive", "gold"): 2}), None),
    ],
)
def test_slots_are_kept_for_interactive_requests_and_for_promises(
    records: list[Waiting], under_way: list[Waiting], room: Room, chosen: int | None
) -> None:
    assert choose(records, under_way, room) == chosen


def several(record: Waiting, slots: int) -> Waiting:
    return replace(record, slots=slots)


@pytest.mark.parametrize(
    ("records", "under_way", "room", "chosen"),
    [
        # A batch request for four answers isn't begun where three of them would wait for interactive's slot.
        ([several(waiting("batch"), 4)], [waiting("batch")] * 4, Room(8, 1), None),
        ([several(waiting("batch"), 4)], [waiting("batch")] * 3, Room(8, 1), 0),
        ([waiting("batch")], [several(waiting("batch"), 7)], Room(8, 1), None),
        # One that is larger than all there is for it has that for itself.
        ([several(waiting("batch"), 8)], [], Room(4, 1), 0),
        # What a tenant's answers take counts as its own.
        (
            [waiting(tenant="a"), waiting(tenant="b", taken=9)],
            [several(waiting(tenant="a"), 3), *running(b=2)],
            Room(8),
            1,
        ),
        ([several(waiting(tenant="a"), 2)], running(a=1), Room(4, guaranteed={("interactive", "gold"): 2}), None),
    ],
)
def test_a_request_for_several_answers_takes_as_many_slots(
    records: list[Waiting], under_way: list[Waiting], room: Room, chosen: int | None
) -> None:
    assert choose(records, under_way, room) == chosen


@pytest.mark.parametrize(
    ("configured", "slots", "tiers", "kept"),
    [
        (None, 16, ["interactive", "batch"], 2),
        (None, 4, ["interactive", "batch"], 1),
        (None, 1, ["interactive", "batch"], 0),
        (None, 16, ["interactive"], 0),
        (None, 16, ["batch"], 0),
        (5, 16, ["interactive", "batch"], 5),
        (0, 16, ["interactive", "batch"], 0),
        (16, 16, ["interactive", "batch"], 15),
    ],
)
def test_one_slot_in_eight_is_interactives_where_nothing_else_is_said(
    configured: int | None, slots: int, tiers: list[str], kept: int
) -> None:
    assert interactive_slots(configured, slots, tiers) == kept


@given(
    arrivals=st.lists(st.lists(RECORD, max_size=4), max_size=30),
    slots=st.integers(2, 6),
    ends=st.lists(st.integers(0, 99), max_size=30),
)
def test_no_slot_that_somebody_may_use_stays_empty_and_batch_never_takes_interactives(
    arrivals: list[list[Waiting]], slots: int, ends: list[int]
) -> None:
    room, queue, under_way = Room(slots, 1), list[Waiting](), list[Waiting]()
    for number, records in enumerate(arrivals):
        queue += [replace(record, taken=number, standing=FRESH) for record in records]
        while len(under_way) < slots and (index := choose(queue, under_way, room)) is not None:
            under_way.append(queue.pop(index))
        assert sum(record.tier != "interactive" for record in under_way) <= slots - 1
        if len(under_way) < slots:
            assert all(record.tier != "interactive" for record in queue)
            assert not queue or len(under_way) == slots - 1
        if under_way and number < len(ends):
            under_way.pop(ends[number] % len(under_way))


def test_one_guest_in_eight_slots() -> None:
    assert [guest_slots(slots) for slots in (1, 7, 8, 16, 33)] == [0, 0, 1, 2, 4]


def test_a_deadline_is_past_from_its_own_millisecond_on() -> None:
    assert not expired(waiting(deadline_ms=10), 9)
    assert expired(waiting(deadline_ms=10), 10)
