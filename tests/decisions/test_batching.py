"""Batches: never too large, never mixed, nobody waits beside an idle instance, and those in a hurry go first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions import batching
from decisions.batching import Limits, Queue, Waiting, slices

FAR_MS = 1_000_000.0


def one(
    number: int, rows: int = 1, *, signature: str = "s", at: float = 0, deadline: float = FAR_MS, priority: int = 0
):
    return Waiting(number, signature, rows, at, deadline, priority)


def queue_of(limits: Limits, *waiting: Waiting) -> Queue:
    queue = Queue(limits)
    for each in waiting:
        queue.add(each)
    return queue


def numbers(batch: list[Waiting]) -> list[int]:
    return [each.number for each in batch]


class TestWhatRunsTogether:
    def test_given_no_delay_what_is_there_goes_at_once(self) -> None:
        queue = queue_of(Limits(8), one(1), one(2), one(3, 4))
        assert numbers(queue.next_batch(0)) == [1, 2, 3]
        assert len(queue) == 0

    def test_given_two_signatures_each_runs_by_itself(self) -> None:
        queue = queue_of(Limits(8), one(1), one(2, signature="t"), one(3))
        assert numbers(queue.next_batch(0)) == [1, 3]
        assert numbers(queue.next_batch(0)) == [2]
        assert queue.next_batch(0) == []

    def test_given_more_than_fits_the_rest_waits(self) -> None:
        queue = queue_of(Limits(4), one(1, 3), one(2, 3), one(3, 1))
        assert numbers(queue.next_batch(0)) == [1, 3], "what fits goes along"
        assert numbers(queue.next_batch(0)) == [2]

    def test_given_a_size_of_one_nothing_is_batched(self) -> None:
        queue = queue_of(Limits(1), one(1), one(2))
        assert numbers(queue.next_batch(0)) == [1]
        assert numbers(queue.next_batch(0)) == [2]

    @pytest.mark.parametrize("rows", [0, -1, 9])
    def test_rows_that_no_batch_holds_are_refused(self, rows: int) -> None:
        with pytest.raises(ValueError, match="from 1 to 8 can"):
            queue_of(Limits(8), one(1, rows))

    def test_a_number_waits_once(self) -> None:
        with pytest.raises(ValueError, match="waits already"):
            queue_of(Limits(8), one(1), one(1))


class TestWhoseTurn:
    def test_given_two_hundred_of_low_priority_one_of_high_priority_is_next(self) -> None:
        """triton#6055."""
        queue = queue_of(Limits(1), *(one(n, priority=1) for n in range(200)))
        queue.add(one(200, at=5))
        assert numbers(queue.next_batch(5)) == [200]

    def test_given_room_in_the_batch_low_priority_goes_along(self) -> None:
        queue = queue_of(Limits(3), one(1, priority=1), one(2, priority=1), one(3), one(4))
        assert numbers(queue.next_batch(0)) == [3, 4, 1]

    def test_given_one_priority_the_earliest_deadline_is_first(self) -> None:
        queue = queue_of(Limits(1), one(1, deadline=900), one(2, deadline=800), one(3, deadline=800))
        assert [numbers(queue.next_batch(0)) for _ in range(3)] == [[2], [3], [1]]

    def test_the_first_in_line_decides_the_signature(self) -> None:
        queue = queue_of(Limits(2), *(one(n, priority=1) for n in range(6)), one(9, signature="t"))
        assert numbers(queue.next_batch(0)) == [9]


class TestWaitingForCompany:
    LIMITS = Limits(4, max_queue_delay_ms=10, preferred_batch_sizes=(2,))

    def test_one_alone_waits_until_the_delay_has_passed(self) -> None:
        queue = queue_of(self.LIMITS, one(1, at=5))
        assert queue.next_batch(14.9) == []
        assert queue.wake_ms() == 15
        assert numbers(queue.next_batch(15)) == [1]
        assert queue.wake_ms() is None

    def test_the_first_in_line_is_not_passed_by_however_many_make_a_preferred_size_behind_it(self) -> None:
        queue = Queue(Limits(16, preferred_batch_sizes=(2,)))
        for number in range(1, 4):
            queue.add(Waiting(number, "s", 2, 0, 60_000, priority=1))
        queue.add(Waiting(4, "s", 3, 1, 5_000))
        assert 4 in [each.number for each in queue.next_batch(1)]

    def test_a_preferred_size_goes_at_once(self) -> None:
        queue = queue_of(self.LIMITS, one(1), one(2), one(3))
        assert numbers(queue.next_batch(0)) == [1, 2]
        assert queue.next_batch(0) == []

    def test_a_full_batch_goes_at_once(self) -> None:
        queue = queue_of(Limits(4, 10), one(1, 3), one(2, 3))
        assert numbers(queue.next_batch(0)) == [1], "no company would help it"
        assert queue.next_batch(0) == []

    def test_what_is_full_goes_before_what_still_waits(self) -> None:
        queue = queue_of(Limits(2, 10), one(1, signature="t"), one(2, priority=1), one(3, priority=1))
        assert numbers(queue.next_batch(0)) == [2, 3]
        assert numbers(queue.next_batch(10)) == [1]

    def test_a_near_deadline_shortens_the_wait(self) -> None:
        queue = queue_of(self.LIMITS, one(1, at=100, deadline=104))
        assert queue.wake_ms() == 102
        assert numbers(queue.next_batch(102)) == [1]


class TestLeaving:
    def test_those_past_their_deadline_never_run(self) -> None:
        queue = queue_of(Limits(8), one(1, deadline=50), one(2, deadline=60), one(3))
        assert numbers(queue.expired(50)) == [1]
        assert numbers(queue.next_batch(50)) == [2, 3]
        assert queue.expired(1e9) == []

    def test_one_that_left_is_not_run(self) -> None:
        queue = queue_of(Limits(8, 10), one(1, at=0), one(2, at=4))
        assert queue.remove(1) is not None
        assert queue.remove(1) is None
        assert queue.wake_ms() == 14
        assert numbers(queue.next_batch(14)) == [2]

    def test_of_those_that_left_only_the_ones_that_waited_are_told(self) -> None:
        queue = queue_of(Limits(8), one(1), one(2), one(3, signature="t"))
        assert numbers(queue.remove_all([3, 7, 1, 1])) == [3, 1]
        assert queue.remove_all([3, 1]) == []
        assert numbers(queue.next_batch(0)) == [2]


class Counting(Queue):
    """Counts how often it asks how long one may wait."""

    asked = 0

    def due_ms(self, waiting: Waiting) -> float:
        self.asked += 1
        return super().due_ms(waiting)


@pytest.mark.parametrize("leave", ["run", "late", "one by one", "all"])
def test_those_that_leave_cost_nothing_for_each_that_stays(leave: str) -> None:
    queue = Counting(Limits(1))
    for number in range(500):
        queue.add(one(number, deadline=number))
    for number in range(500):
        if leave == "run":
            queue.next_batch(0)
        elif leave == "late":
            queue.expired(number)
        elif leave == "one by one":
            queue.remove(number)
        queue.wake_ms()
    queue.remove_all(range(500))
    assert (len(queue), queue.wake_ms(), queue.first_deadline_ms()) == (0, None, None)
    assert queue.asked <= 2 * 500, "once for each that comes"


@pytest.mark.parametrize(("rows", "cut"), [(1, [(0, 1)]), (4, [(0, 4)]), (9, [(0, 4), (4, 8), (8, 9)]), (0, [])])
def test_a_large_request_is_cut_in_order(rows: int, cut: list[tuple[int, int]]) -> None:
    assert slices(rows, 4) == cut


@dataclass
class Site:
    """A queue with instances that take `run_ms` a batch, by a clock of its own. Keeps what ran when."""

    limits: Limits
    instances: int
    run_ms: float
    now_ms: float = 0
    free_ms: list[float] = field(default_factory=list)
    ran: list[tuple[float, list[Waiting]]] = field(default_factory=list)
    late: list[tuple[float, Waiting]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = Queue(self.limits)
        self.free_ms = [0.0] * self.instances

    def idle(self) -> int | None:
        return next((i for i, free in enumerate(self.free_ms) if free <= self.now_ms), None)

    def pump(self) -> None:
        self.late += [(self.now_ms, each) for each in self.queue.expired(self.now_ms)]
        while (instance := self.idle()) is not None and (batch := self.queue.next_batch(self.now_ms)):
            self.ran.append((self.now_ms, batch))
            self.free_ms[instance] = self.now_ms + self.run_ms

    def advance(self, until_ms: float) -> None:
        """To a time, stopping wherever a worker would wake."""
        while True:
            self.pump()
            wake = self.queue.wake_ms()
            times = [free for free in self.free_ms if free > self.now_ms and len(self.queue)]
            if wake is not None and self.idle() is not None:
                assert wake > self.now_ms, "nobody waits past the delay beside an idle instance"
                times.append(wake)
            step = min((time for time in times if time <= until_ms), default=None)
            if step is None:
                self.now_ms = max(self.now_ms, until_ms)
                self.pump()
                return
            self.now_ms = step


LIMITS = st.builds(
    Limits,
    max_batch_size=st.integers(1, 9),
    max_queue_delay_ms=st.sampled_from([0, 3, 20]),
    preferred_batch_sizes=st.lists(st.integers(1, 12), max_size=3).map(tuple),
)
ARRIVAL = st.tuples(st.integers(0, 8), st.integers(1, 9), st.sampled_from("ab"), st.integers(1, 80), st.integers(0, 2))
ARRIVALS = st.lists(ARRIVAL, max_size=40)


@given(limits=LIMITS, instances=st.integers(1, 3), run_ms=st.integers(1, 30), arrivals=ARRIVALS)
def test_whatever_comes_batches_keep_their_rules(
    limits: Limits, instances: int, run_ms: int, arrivals: list[Any]
) -> None:
    site = Site(limits, instances, run_ms)
    given_ = []
    for number, (pause_ms, rows, signature, patience_ms, priority) in enumerate(arrivals):
        site.advance(site.now_ms + pause_ms)
        waiting = Waiting(
            number, signature, min(rows, limits.max_batch_size), site.now_ms, site.now_ms + patience_ms, priority
        )
        site.queue.add(waiting)
        given_.append(waiting)
    site.advance(site.now_ms + 10_000)

    for at_ms, batch in site.ran:
        assert 0 < sum(each.rows for each in batch) <= limits.max_batch_size
        assert len({each.signature for each in batch}) == 1
        assert all(each.deadline_ms > at_ms for each in batch), "what is late never runs"
    run = [each for _, batch in site.ran for each in batch]
    ended = sorted([*run, *(each for _, each in site.late)], key=lambda each: each.number)
    assert ended == given_, "each runs once, or is told that it is late"


@given(
    waiting=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=30),
    preferred=st.sets(st.integers(1, 4)),
    delay_ms=st.integers(0, 5),
)
def test_nothing_in_the_queue_should_have_gone_before_the_first_of_a_batch(
    waiting: list[Any], preferred: set[int], delay_ms: int
) -> None:
    queue = Queue(Limits(12, delay_ms, tuple(preferred)))
    for number, (rows, priority, deadline) in enumerate(waiting):
        queue.add(Waiting(number, "s", rows, 0, deadline, priority))
    seen = []
    while batch := queue.next_batch(0) or queue.next_batch(delay_ms):
        seen.append(batch[0])
    ranks = [(each.priority, each.deadline_ms, each.number) for each in seen]
    assert ranks == sorted(ranks)


@dataclass
class Plain:
    """What a queue does, by going through all that wait each time."""

    limits: Limits
    waiting: list[Waiting] = field(default_factory=list)

    def take(self, taken: list[Waiting]) -> list[int]:
        self.waiting = [each for each in self.waiting if each not in taken]
        return numbers(taken)

    def due_ms(self, each: Waiting) -> float:
        return each.arrived_ms + max(0.0, min(self.limits.max_queue_delay_ms, (each.deadline_ms - each.arrived_ms) / 2))

    def expired(self, now_ms: float) -> list[int]:
        late = [each for each in self.waiting if each.deadline_ms <= now_ms]
        return self.take(sorted(late, key=lambda each: (each.deadline_ms, each.number)))

    def wake_ms(self) -> float | None:
        return min(map(self.due_ms, self.waiting), default=None)

    def first_deadline_ms(self) -> float | None:
        return min((each.deadline_ms for each in self.waiting), default=None)

    def next_batch(self, now_ms: float) -> list[int]:
        line = sorted(self.waiting, key=lambda each: (each.priority, each.deadline_ms, each.number))
        for signature in dict.fromkeys(each.signature for each in line):
            alike = [each for each in line if each.signature == signature]
            if batch := self.ready(alike, now_ms):
                return self.take(batch)
        return []

    def ready(self, alike: list[Waiting], now_ms: float) -> list[Waiting]:
        for target in self.limits.targets:
            batch = self.fill(alike, target)
            enough = sum(each.rows for each in alike) >= target
            full = target == self.limits.max_batch_size or sum(each.rows for each in batch) == target
            if enough and full and batch[0] == alike[0]:
                return batch
        due = any(self.due_ms(each) <= now_ms for each in alike)
        return self.fill(alike, self.limits.max_batch_size) if due else []

    def fill(self, alike: list[Waiting], target: int) -> list[Waiting]:
        batch: list[Waiting] = []
        for each in alike:
            if sum(one.rows for one in batch) + each.rows <= target:
                batch.append(each)
        return batch


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(ARRIVAL, min_size=1, max_size=12)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 60), max_size=12)),
        st.tuples(st.sampled_from(["expired", "next_batch"]), st.integers(0, 15)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("few", [2, batching.FEW])
@given(limits=LIMITS, steps=STEPS)
def test_a_queue_does_as_if_it_went_through_all_that_wait(few: int, limits: Limits, steps: list[Any]) -> None:
    queue, plain, now_ms, number = Queue(limits), Plain(limits), 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "FEW", few)
        for name, what in steps:
            if name == "add":
                for _, rows, signature, patience_ms, priority in what:
                    number += 1
                    rows_ = min(rows, limits.max_batch_size)
                    waiting = Waiting(number, signature, rows_, now_ms, now_ms + patience_ms, priority)
                    queue.add(waiting)
                    plain.waiting.append(waiting)
            elif name == "remove":
                left = [each for each in dict.fromkeys(what) if any(one.number == each for one in plain.waiting)]
                assert numbers(queue.remove_all(what)) == left
                plain.take([each for each in plain.waiting if each.number in left])
            else:
                now_ms += what
                assert numbers(getattr(queue, name)(now_ms)) == getattr(plain, name)(now_ms)
            assert len(queue) == len(plain.waiting)
            assert queue.wake_ms() == plain.wake_ms()
            assert queue.first_deadline_ms() == plain.first_deadline_ms()
