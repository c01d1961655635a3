"""Who asks at its tenant's limit, and finds what a front door that is gone has left. No broker: the log is a list."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from decisions.accounts import Accounts
from decisions.admission import BEFORE_TOKENISING
from decisions.cases import Case, judge
from decisions.verdicts import YIELDED_TEXT
from infra.settings import KafkaSettings
from schemas.events import (
    ApiKey,
    FrontDoorSeen,
    InferenceCancelled,
    InferenceFailed,
    Quota,
    Reply,
    TenantChanged,
    WorkerReported,
)
from schemas.topics import CONTROL, TOKENS
from streams.presence import ENDING_WAIT_S, UNSURE_WAIT_S, LivePresence, Slots
from tests.decisions.ledgers import Asked, admitted
from tests.decisions.worlds import NOW, FakeWorld, case
from tests.streams.bytes_taken import BytesTaken

GONE_MS = 10_000
"""So long after `gone` was heard last the request comes, of `here`."""


class Log(BytesTaken):
    """Takes everything."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    async def send(self, topic: str, event: Any, **_more: Any) -> asyncio.Future[None]:
        self.events.append((topic, event))
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        confirmed.set_result(None)
        return confirmed


class Site(FakeWorld):
    """A tenant that may have so many requests at once, and what it has open, of these doors."""

    def __init__(self, *doors: str, at_once: int | None = None) -> None:
        super().__init__()
        self.presence = LivePresence(KafkaSettings())
        self.log = Log()
        self.accounts: Accounts | None = Accounts("interactive")
        quota = Quota("interactive", concurrent_requests=at_once or len(doors))
        key = ApiKey("k1", "0" * 64, ("interactive",), 0)
        self.tenants["acme"] = TenantChanged("acme", "salt", (key,), 0, quotas=(quota,))
        for number, door in enumerate(doors):
            asked = Asked(NOW - 60_000 + number, f"r{number}", 5, "k1")
            self.accounts.apply(number, NOW, admitted(asked, number, door=door, reply=Reply(TOKENS, number)))
        for at_ms in range(0, GONE_MS + 1, 500):
            self.heard("here", at_ms)
            if not at_ms:
                self.heard("gone", at_ms)
        self.slots = Slots(self, self, self.log)  # type: ignore[arg-type]

    def heard(self, door: str, at_ms: int) -> None:
        record: Any = SimpleNamespace(timestamp=NOW + at_ms - GONE_MS)
        self.presence._on_event(FrontDoorSeen(door), record)

    async def of(self, _partition: int) -> Accounts | None:
        return self.accounts

    def counters(self, _partition: int, tenant: str) -> Any:
        return Accounts("interactive").counters(tenant) if self.accounts is None else self.accounts.counters(tenant)

    def refused(self, **request: Any) -> Case:
        found, refusal = judge(case(door="here", **request), self, BEFORE_TOKENISING)
        assert refusal is not None
        return found

    @property
    def ended(self) -> list[str]:
        """What was ended, by the word to its caller."""
        return [event.request_id for topic, event in self.log.events if topic == TOKENS]


def left_s(until_s: float) -> float:
    return until_s - asyncio.get_running_loop().time()


async def test_what_is_gone_is_cancelled_for_its_caller_and_for_workers_once() -> None:
    site = Site("here", "gone")
    with site.slots.asking() as asking:
        assert 0 < left_s(await site.slots.look(site.refused(), asking)) <= ENDING_WAIT_S
        site.heard("here", GONE_MS + 500)
        await site.slots.look(site.refused(), asking)
        noted = asking.noted(site.refused()).decisions[-1]
    (told, ending), (control, word) = site.log.events
    assert (told, control, word) == (TOKENS, CONTROL, InferenceCancelled("r1", "acme"))
    assert isinstance(ending, InferenceFailed)
    assert (ending.request_id, ending.tier, ending.message) == ("r1", "interactive", YIELDED_TEXT)
    assert (noted.check, "r1" in noted.detail) == ("slot", True)


async def test_of_two_who_ask_at_once_each_needs_one_to_make_way() -> None:
    site = Site("gone", "gone", "here")
    with site.slots.asking() as first, site.slots.asking() as second, site.slots.asking() as third:
        for asking in (first, second):
            assert await site.slots.look(site.refused(), asking)
        assert not await site.slots.look(site.refused(), third)
        assert third.noted(site.refused()) == site.refused()
    assert site.ended == ["r0", "r1"]


async def test_what_was_cancelled_in_vain_is_cancelled_again_for_the_next() -> None:
    site = Site("gone")
    for _ in range(2):
        with site.slots.asking() as asking:
            await site.slots.look(site.refused(), asking)
    assert site.ended == ["r0", "r0"]


@pytest.mark.parametrize(("timeout_ms", "waits_s"), [(None, UNSURE_WAIT_S), (60_000, UNSURE_WAIT_S), (1_000, 1.0)])
async def test_who_is_unsure_waits_until_a_door_is_heard_but_not_beyond_its_deadline(
    timeout_ms: int | None, waits_s: float
) -> None:
    site = Site("quiet")
    site.heard("quiet", GONE_MS)
    later = replace(site.refused(timeout_ms=timeout_ms), requested_ms=NOW + 100)
    with site.slots.asking() as asking:
        until_s = await site.slots.look(later, asking)
        assert waits_s - 1 < left_s(until_s) <= waits_s
        assert await site.slots.look(later, asking) == until_s
        site.heard("quiet", GONE_MS + 200)
        assert await site.slots.look(later, asking) == 0
    assert not site.ended


async def test_nobody_is_ended_where_that_makes_no_room_or_the_partition_is_anothers() -> None:
    for site in (Site("gone", "here", at_once=1), Site("", at_once=1), Site("here")):
        with site.slots.asking() as asking:
            assert await site.slots.look(site.refused(), asking) == 0
        assert not site.ended
    site = Site("gone")
    refused, site.accounts = site.refused(), None
    with site.slots.asking() as asking:
        assert await site.slots.look(refused, asking) == 0
    assert not site.ended


def test_what_else_is_told_in_the_topic_is_passed_over() -> None:
    presence = LivePresence(KafkaSettings())
    presence._on_event(WorkerReported("w", "m", "1", "ready", (), 1, 0, 0), SimpleNamespace(timestamp=NOW))
    assert presence.looks == 0
