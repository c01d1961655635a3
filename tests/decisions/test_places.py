"""No more have a place in a queue than its depth says, in whatever order they come, are fetched, decided, refused, held back and lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decisions.admission import check_wait
from decisions.cases import Case, Refusal
from decisions.places import Places, full, has_room, limited, outlook
from schemas.events import Position
from tests.decisions.worlds import NOW, WORK, FakeWorld, case, worker

QUEUE, OTHER = ("m", "v1"), ("m", "v2")


def at(offset: int, world: FakeWorld, *, depth: int = 3, ahead: int = 0, placed: bool = False) -> Case:
    """A routed case whose record is at this offset."""
    version = replace(world.models["m"], max_queue_depth={"interactive": depth})
    found = replace(case(), source=Position("requests.interactive", 0, offset), deadline_ms=NOW + 1_000_000)
    return replace(found, version=version, ahead=ahead, placed=placed)


def test_a_place_is_had_once_and_in_one_queue() -> None:
    places, who, beside = Places(), at(1, FakeWorld()).source, at(2, FakeWorld()).source
    places.take(who, QUEUE)
    places.take(who, QUEUE)
    assert (places.has(who, QUEUE), places.others(who, QUEUE), places.others(beside, QUEUE)) == (True, 0, 1)
    places.take(who, OTHER)
    assert (places.has(who, QUEUE), places.others(beside, QUEUE), places.others(beside, OTHER)) == (False, 0, 1)
    places.give_back(who)
    places.give_back(who)
    assert (places.has(who, OTHER), places.others(beside, OTHER)) == (False, 0)


@pytest.mark.parametrize(("ahead", "room"), [(0, True), (2, True), (6, True), (7, False)])
def test_who_is_on_its_way_takes_the_free_slots_first(ahead: int, *, room: bool) -> None:
    world = FakeWorld(seen=[worker("a", {0: 0}, slots=4, service_ms=1)], ends={(WORK, 0): 0})
    asked = at(1, world, ahead=ahead)
    assert has_room(asked, world) is room
    assert isinstance(check_wait(asked, world), Case) is room


def test_free_slots_of_one_worker_are_free_though_another_is_full() -> None:
    busy, idle = worker("a", {0: 0}, slots=1, service_ms=1), worker("b", {1: 0}, slots=8, service_ms=1)
    world = FakeWorld(seen=[busy, idle], ends={(WORK, 0): 30})
    seen = [outlook(at(1, world, ahead=ahead), world) for ahead in (7, 8, 9)]
    assert [(each.free, each.waiting) for each in seen] == [(1, 29), (0, 29), (0, 30)]


def test_a_queue_without_a_depth_has_room_for_all() -> None:
    world = FakeWorld(waits=9)
    asked = replace(at(1, world), tier="batch")
    assert not limited(asked)
    assert has_room(asked, world)


class AnyOrder(RuleBasedStateMachine):
    """One queue of a tier, as the turnstile keeps it."""

    @initialize(depth=st.integers(1, 4), slots=st.integers(0, 2))
    def begin(self, depth: int, slots: int) -> None:
        self.depth, self.slots, self.number = depth, slots, 0
        self.places = Places()
        self.queued = 0
        self.held: list[Position] = []
        self.in_hand: list[Position] = []

    def _world(self) -> FakeWorld:
        if not self.slots:
            return FakeWorld(waits=self.queued)
        return FakeWorld(seen=[worker("a", {0: 0}, slots=self.slots, service_ms=1.0)], ends={(WORK, 0): self.queued})

    def _case(self, who: Position) -> Case:
        ahead = self.places.others(who, QUEUE) + len(self.held)
        has = self.places.has(who, QUEUE)
        return at(who.offset, self._world(), depth=self.depth, ahead=ahead, placed=has)

    def _refusal(self, who: Position) -> Refusal | None:
        asked, world = self._case(who), self._world()
        return full(asked, world, outlook(asked, world))

    @rule()
    def comes(self) -> None:
        """It is fetched or decided from now on."""
        who = Position("requests.interactive", 0, self.number)
        self.number += 1
        if has_room(self._case(who), self._world()):
            self.places.take(who, QUEUE)
        self.in_hand.append(who)

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data(), fits=st.booleans())
    def decided(self, data: st.DataObject, *, fits: bool) -> None:
        """It is let in, unless its queue or something else is in the way."""
        who = data.draw(st.sampled_from(self.in_hand))
        had, refusal = self.places.has(who, QUEUE), self._refusal(who)
        assert not (had and refusal), "who has a place keeps it"
        self.in_hand.remove(who)
        self.places.give_back(who)
        self.queued += fits and refusal is None

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data())
    def waits(self, data: st.DataObject) -> None:
        """Its tenant has enough before the workers: it is held back, or refused."""
        who = data.draw(st.sampled_from(self.in_hand))
        refusal = self._refusal(who)
        self.in_hand.remove(who)
        self.places.give_back(who)
        if refusal is None:
            self.held.append(who)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), goes_on=st.booleans())
    def turn(self, data: st.DataObject, *, goes_on: bool) -> None:
        """It is decided from now on, or was cancelled, is too late, or its partition is gone."""
        who = data.draw(st.sampled_from(self.held))
        self.held.remove(who)
        if goes_on:
            self.places.take(who, QUEUE)
            self.in_hand.append(who)

    @precondition(lambda self: self.queued)
    @rule()
    def ends(self) -> None:
        """One has a slot, or without workers is gone."""
        self.queued -= 1

    @invariant()
    def no_more_than_the_depth(self) -> None:
        if hasattr(self, "places"):
            nobody = Position("", 0, 0)
            have = self.queued + len(self.held) + self.places.others(nobody, QUEUE)
            assert have - self.slots <= self.depth

    def teardown(self) -> None:
        if hasattr(self, "places"):
            for who in self.in_hand:
                self.places.give_back(who)
            assert self.places.others(Position("", 0, 0), QUEUE) == 0


TestAnyOrder = AnyOrder.TestCase
