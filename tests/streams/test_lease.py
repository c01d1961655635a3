from __future__ import annotations

from typing import Any

from streams.lease import Lease


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


class Coordinator:
    """As much of aiokafka's as is watched."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.answers = clock, True

    async def _do_heartbeat(self) -> bool:
        self.clock.ms += 500
        return self.answers


def made() -> tuple[Lease, Clock]:
    clock = Clock()
    return Lease(10_000, clock), clock


def test_nothing_is_held_before_partitions_are_given() -> None:
    assert not made()[0].holds


def test_it_holds_for_a_part_of_a_session() -> None:
    lease, clock = made()
    lease.proved()
    assert lease.until_ms == clock.ms + 6_000
    clock.ms += 5_999
    assert lease.holds
    clock.ms += 1
    assert not lease.holds


async def test_a_heartbeat_that_was_answered_renews_it_from_when_it_was_sent() -> None:
    lease, clock = made()
    coordinator: Any = Coordinator(clock)
    lease.watch(coordinator)
    lease.watch(coordinator)
    sent_ms = clock.ms
    assert await coordinator._do_heartbeat() is True
    assert clock.ms == sent_ms + 500
    assert lease.until_ms == sent_ms + 6_000
    coordinator.answers = False
    assert await coordinator._do_heartbeat() is False
    assert lease.until_ms == sent_ms + 6_000


def test_an_older_proof_takes_nothing_back() -> None:
    lease, clock = made()
    lease.proved()
    lease.proved(clock.ms - 3_000)
    assert lease.until_ms == clock.ms + 6_000


def test_brokers_whose_clocks_are_ahead_are_allowed_for() -> None:
    lease, clock = made()
    lease.proved()
    lease.heard(clock.ms + 9_000)
    assert lease.until_ms == clock.ms + 15_000
    lease.heard(clock.ms - 9_000)
    assert lease.until_ms == clock.ms + 6_000


def test_what_was_let_in_may_come_to_count_for_as_long_as_a_session() -> None:
    """The log takes it by a clock that may be behind, so its validity by that clock ends later."""
    lease, clock = made()
    lease.proved()
    clock.ms += 6_000
    assert not lease.holds
    assert lease.left_s == 4
    clock.ms += 5_000
    assert lease.left_s == 0
