"""What is parked is called in its lane's order, by turns between lanes, in time, and ends once, whatever comes between."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from decisions.lanes import STALE_MAX, Lanes, Place, State, Stub
from schemas.events import Reply

PLACE = ("m", "1")
MANY = 1_000_000
FAR_MS = 1_000_000
REPLY = Reply("tokens", 0)


def stub(offset: int, tenant: str = "a", place: Place = PLACE, deadline_ms: int = FAR_MS, **fields: Any) -> Stub:
    made = Stub(fields.pop("partition", 0), offset, place, tenant, "k1", f"r{offset}", REPLY, deadline_ms, 100)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def lanes(*stubs: Stub) -> Lanes:
    made = Lanes()
    for each in stubs:
        made.park(each)
    return made


def offsets(stubs: list[Stub]) -> list[int]:
    return [each.offset for each in stubs]


def call(of: Lanes, want: int = MANY, now_ms: int = 0, most: int = MANY, bytes_most: int = MANY) -> list[int]:
    return offsets(of.call(lambda *_: want, now_ms, most, bytes_most))


def test_of_each_lane_as_many_as_it_wants_in_its_order() -> None:
    of = lanes(*(stub(number, tenant) for number, tenant in enumerate("aabab")))
    assert call(of, 2) == [0, 1, 2, 4]
    assert call(of) == [3]
    assert of.behind(PLACE, "a") == 3
    assert of.called(PLACE, "b") == 2


def test_a_lane_knows_what_is_being_read_of_it() -> None:
    of = lanes(stub(1), stub(2))
    assert call(of, 1) == [1]
    seen = []

    def wants(*told: Any) -> int:
        seen.append(told)
        return 0

    of.call(wants, 0, MANY, MANY)
    assert seen == [(PLACE, "a", 0, 1)]


def test_no_lane_is_first_twice_while_others_wait() -> None:
    of = lanes(*(stub(number, "ab"[number % 2]) for number in range(6)))
    assert [call(of, 1, most=1) for _ in range(4)] == [[0], [1], [2], [3]]


def test_no_more_bytes_than_so_many_but_one_record() -> None:
    of = lanes(*map(stub, range(4)))
    assert call(of, bytes_most=1) == [0]
    assert call(of, bytes_most=101) == [1, 2]


def test_at_its_deadline_it_is_called_wherever_it_stands() -> None:
    of = lanes(stub(1), stub(2, deadline_ms=50), stub(3))
    assert call(of, 0, 49) == []
    assert call(of, 0, 50) == [2]
    assert call(of) == [1, 3]


def test_who_may_not_ask_is_called_first() -> None:
    of = lanes(stub(1, "b"), stub(2), stub(3, key_id="gone"), stub(4, "b", key_id="gone"))
    of.hurry("a", lambda each: each.key_id == "gone")
    assert call(of, 0) == [3]
    assert call(of) == [1, 4, 2]


def test_what_cannot_be_read_waits_in_front_again() -> None:
    of = lanes(*map(stub, range(4)))
    called = of.call(lambda *_: 3, 0, MANY, MANY)
    assert of.arrived(0, 0) is called[0]
    of.unread(called)
    assert call(of) == [1, 2, 3]


def test_what_cannot_be_read_waits_in_its_order_also_if_it_comes_back_in_another() -> None:
    of = lanes(*map(stub, range(5)))
    first, second, third = (of.call(lambda *_: 1, 0, 1, MANY) for _ in range(3))
    of.unread(first)
    of.unread(third)
    of.unread(second)
    assert call(of) == [0, 1, 2, 3, 4]
    assert call(of) == []


def test_cancelled_it_is_gone_or_if_it_is_being_read_unwanted() -> None:
    of = lanes(stub(1), stub(2), stub(3, "b"))
    assert call(of, 1) == [1, 3]
    assert offsets(of.cancel("a", "r2")) == [2]
    assert of.cancel("a", "r1") == []
    assert of.find("a", "r1") is None
    read = of.arrived(0, 1)
    assert read is not None
    assert read.unwanted
    assert of.cancel("a", "r3") == []
    assert of.find("b", "r3") is not None
    assert of.behind(PLACE, "a") == 0


def test_twins_are_found_one_by_one_and_cancelled_together() -> None:
    first, other, second = stub(1), stub(1, "b"), stub(2, request_id="r1")
    other.offset = 7
    of = lanes(first, other, second)
    assert of.find("a", "r1") is first
    assert offsets(of.cancel("a", "r1")) == [2, 1]
    assert of.find("a", "r1") is None
    assert of.find("b", "r1") is other


def test_what_is_parked_of_a_partition_that_goes_is_forgotten() -> None:
    of = lanes(stub(1), stub(2, partition=1), stub(3))
    assert call(of, 1) == [1]
    of.drop({0})
    assert of.arrived(0, 1) is None
    assert call(of) == [2]
    assert len(of) == 1


def test_a_partition_is_full_when_there_is_no_room_and_it_has_more_than_its_part() -> None:
    of = lanes(*map(stub, range(6)), stub(9, partition=1))
    assert not of.full(0, 2, 8)
    assert of.full(0, 2, 7)
    assert not of.full(1, 2, 7)


def test_what_is_gone_takes_no_room_for_long() -> None:
    of = lanes(stub(0))
    for number in range(1, 10 * STALE_MAX):
        of.park(stub(number))
        of.cancel("a", f"r{number}")
    assert len(of._deadlines) <= STALE_MAX + 3
    call(of, 0)
    assert len(of._lanes[PLACE, "a"].line) <= STALE_MAX + 2


class Interleaved(RuleBasedStateMachine):
    """Any order of parking, reading, losing sight of the log, cancels and partitions that go. The model is a list of what each record came to."""

    records = Bundle("records")

    def __init__(self) -> None:
        super().__init__()
        self.lanes = Lanes()
        self.next = 0
        self.now_ms = 0
        self.waiting: dict[int, Stub] = {}
        self.called: dict[int, Stub] = {}
        self.ended: set[int] = set()

    @rule(target=records, tenant=st.sampled_from("ab"), model=st.sampled_from("mn"), part=st.integers(0, 1), left=st.integers(1, 40))  # fmt: skip
    def park(self, tenant: str, model: str, part: int, left: int) -> Stub:
        made = stub(self.next, tenant, (model, "1"), self.now_ms + left, partition=part)
        self.next += 1
        self.lanes.park(made)
        self.waiting[made.offset] = made
        return made

    @rule(want=st.integers(0, 3), most=st.integers(1, 5), later=st.integers(0, 5))
    def call(self, want: int, most: int, later: int) -> None:
        self.now_ms += later
        called = self.lanes.call(lambda *_: want, self.now_ms, most, MANY)
        assert len(called) <= most
        for each in called:
            assert self.waiting.pop(each.offset) is each
            self.called[each.offset] = each
            if each.deadline_ms > self.now_ms:  # then it is in its lane's order
                assert not [
                    other
                    for other in self.waiting.values()
                    if (other.place, other.tenant) == (each.place, each.tenant) and other.offset < each.offset
                ]
        if len(called) < most:
            assert not [each for each in self.waiting.values() if each.deadline_ms <= self.now_ms]

    @rule(record=records)
    def arrive(self, record: Stub) -> None:
        found = self.lanes.arrived(record.partition, record.offset)
        assert (found is record) == (record.offset in self.called)
        if found is not None:
            del self.called[record.offset]
            assert record.offset not in self.ended
            self.ended.add(record.offset)

    @rule(record=records)
    def fail(self, record: Stub) -> None:
        self.lanes.unread([record])
        if self.called.pop(record.offset, None) is not None:
            self.waiting[record.offset] = record

    @rule(record=records)
    def cancel(self, record: Stub) -> None:
        gone = self.lanes.cancel(record.tenant, record.request_id)
        assert gone == ([record] if record.offset in self.waiting else [])
        if gone:
            del self.waiting[record.offset]
            self.ended.add(record.offset)
        assert record.unwanted or record.offset not in self.called

    @rule(partition=st.integers(0, 1))
    def revoke(self, partition: int) -> None:
        self.lanes.drop({partition})
        for known in (self.waiting, self.called):
            for offset in [offset for offset, each in known.items() if each.partition == partition]:
                del known[offset]

    @invariant()
    def nothing_is_lost_or_twice_there(self) -> None:
        assert {each.offset for each in self.lanes.all()} == set(self.waiting) | set(self.called)
        assert all(each.state is State.PARKED for each in self.waiting.values())
        assert all(each.state is State.CALLED for each in self.called.values())
        for tenant in "ab":
            for model in "mn":
                counted = [each for each in self.lanes.all() if (each.tenant, each.place[0]) == (tenant, model)]
                assert self.lanes.behind((model, "1"), tenant) == len(counted)

    def teardown(self) -> None:
        """Whatever waits is called in the end."""
        while self.waiting:
            before = len(self.waiting)
            self.call(1, 5, 0)
            assert len(self.waiting) < before


TestInterleaved = Interleaved.TestCase
