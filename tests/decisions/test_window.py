"""The window: never past unfinished work, never further than its size from the last confirmed commit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.window import Waiting, Window, choose, confirm, expired, finish, room, take, window_records

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


def waiting(tier: str = "interactive", tenant: str = "a", deadline_ms: int = 1_000, taken: int = 0) -> Waiting:
    return Waiting(tier, tenant, deadline_ms, taken)


@pytest.mark.parametrize(
    ("records", "running", "chosen"),
    [
        ([], {}, None),
        ([waiting("batch", deadline_ms=1), waiting("interactive", deadline_ms=9)], {}, 1),
        ([waiting("shadow"), waiting("batch")], {}, 1),
        ([waiting("elsewhere"), waiting("shadow")], {}, 1),
        ([waiting(tenant="a", deadline_ms=1), waiting(tenant="b", deadline_ms=9)], {"a": 2, "b": 1}, 1),
        ([waiting(deadline_ms=9), waiting(deadline_ms=1)], {"a": 2}, 1),
        ([waiting(taken=2), waiting(taken=1)], {}, 1),
        ([waiting("interactive", "a"), waiting("batch", "b")], {"a": 100}, 0),
    ],
)
def test_choice_is_by_tier_then_share_then_deadline_then_order(
    records: list[Waiting], running: dict[str, int], chosen: int | None
) -> None:
    assert choose(records, running) == chosen


def test_a_deadline_is_past_from_its_own_millisecond_on() -> None:
    assert not expired(waiting(deadline_ms=10), 9)
    assert expired(waiting(deadline_ms=10), 10)
