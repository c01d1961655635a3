"""A place in a model's queue is taken when a request's fetching or deciding begins, and is free again whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiokafka.structs import RecordMetadata

from decisions.accounts import Accounts
from decisions.queues import pool_name
from infra.grants import Grant, mint
from infra.log import EventDecoder, NotDelivered
from infra.settings import AdmissionSettings
from schemas.codec import encode
from schemas.errors import HeadraceError
from schemas.events import (
    InferenceAdmitted,
    InferenceCancelled,
    InferenceRejected,
    InferenceRequested,
    PayloadStored,
    TenantChanged,
)
from schemas.parts import ApiKey, Reply
from schemas.payloads import PayloadUnreadable
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER, TOKENS
from streams.admission import Admission
from streams.cache import ResponseCache
from streams.faust_shell import LeftUndone, Record
from streams.lease import Lease
from streams.turnstile import Turnstile
from tests.decisions.worlds import NOW
from tests.streams.test_admission_late import REQUESTS, SECRET, SESSION_MS, Books, Tokenizers, World
from tests.streams.test_idempotency_crashes import Log

DEPTH, SHARE = 6, 4
"""So many may wait for the model, and so many of a tenant before its workers."""
SPINS, SETTLED_S = 100, 0.2
"""Within so many turns of the loop all that needs no clock has gone on, and within that time what is held back, too."""
REFERENCE = PayloadStored("r", "acme", "InferenceRequested", "0" * 64, 1_000_000)
WAIT_S = 10.0
Task = asyncio.Task[None]


class Queue(World):
    """Where what is let in waits for ever."""

    def queued(self, model: str, version: str) -> int:
        return self.accounts.queues.total(pool_name(model, version))

    def queueing(self, pool: str) -> set[str]:
        return set(self.accounts.queues.tenants(pool))

    def queueing_at_most(self, pool: str) -> int:
        return len(self.queueing(pool))


class Slow(Log):
    """A log that takes nothing while `takes` isn't set, and what it refuses isn't written."""

    def __init__(self) -> None:
        super().__init__()
        self.takes = asyncio.Event()
        self.takes.set()

    async def send(self, topic: str, event: Any, **more: Any) -> asyncio.Future[RecordMetadata]:
        await self.takes.wait()
        if not self.left:
            raise NotDelivered("the log is away")
        return await super().send(topic, event, **more)


class Owned(Books):
    """Ledgers of a partition that is ours, or another's."""

    def __init__(self) -> None:
        super().__init__(goes=False)
        self.ours = True

    async def of(self, partition: int) -> Accounts | None:
        return await super().of(partition) if self.ours else None

    def current(self, partition: int, accounts: Accounts) -> bool:
        return self.ours and super().current(partition, accounts)

    async def remembers(self, _partition: int, _accounts: Accounts) -> bool:
        return self.ours


class Gate(Tokenizers, EventDecoder):
    """What is tokenised, or fetched, waits here while it is closed, and then is as `found` or `fetched` says. Who came last goes first."""

    def __init__(self, settings: AdmissionSettings) -> None:
        EventDecoder.__init__(self, settings.kafka)
        self.closed = False
        self._waiting: list[asyncio.Future[None]] = []
        self.found: Callable[[], tuple[int, ...]] = lambda: (1, 2, 3)
        self.fetched: Callable[[str], InferenceRequested] = lambda rid: InferenceRequested(rid, "m", prompt="large")

    def open(self) -> None:
        self.closed = False
        for waiting in reversed(self._waiting):
            if not waiting.done():
                waiting.set_result(None)

    async def _pass(self) -> None:
        if self.closed:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    async def tokenise(self, *_: object) -> tuple[int, ...]:
        await self._pass()
        return self.found()

    async def follow(self, reference: PayloadStored) -> Any:
        await self._pass()
        return self.fetched(reference.request_id)


class Reading:
    """Whoever hands on records: as many at once as come."""

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        yield


class Tier:
    """A running admission without a log."""

    def __init__(self) -> None:
        settings, lease = AdmissionSettings(grant_secret=SECRET), Lease(SESSION_MS, lambda: NOW)
        lease.proved()
        self.log, self.books, self.gate = Slow(), Owned(), Gate(settings)
        world: Any = Queue(self.books.accounts)
        world.tenants["acme"] = TenantChanged("acme", "salt", (ApiKey("k1", "0" * 64, ("interactive",), 0),), 0)
        world.models["m"] = replace(
            world.models["m"], default_timeout_ms=3_600_000, max_queue_depth={"interactive": DEPTH}
        )
        self.turnstile = Turnstile(world, "interactive", 10_000)
        self.turnstile.reading = Reading()
        cache = ResponseCache(settings, world, self.gate)
        log, books, gate = self.log, self.books, self.gate
        parts: Any = (log, gate, world, gate, books, lease, self.turnstile, cache)
        self._admission = Admission(settings, *parts)
        self._grant = mint(SECRET, Grant("acme", "k1", ("interactive",), Reply(TOKENS, 1), NOW + 60_000)).encode()
        self._count = 0

    async def ask(self, *, by_reference: bool = False) -> tuple[str, Task]:
        """One request more, when whatever can go on has gone on: its id."""
        rid = f"01900000-0000-7000-8000-{self._count:012d}"
        event: Any = InferenceRequested(rid, "m", prompt="hey")
        if by_reference:
            outline = encode(replace(event, prompt=None))
            event = PayloadStored(rid, "acme", "InferenceRequested", "0" * 64, 1_000_000, outline=outline)
        return rid, await self.tell(event)

    async def tell(self, event: Any) -> Task:
        record = Record(
            REQUESTS, 0, self._count, NOW + self._count, b"acme", encode(event), ((GRANT_HEADER, self._grant),)
        )
        self._count += 1
        task = asyncio.create_task(self._handle(record))
        for _ in range(SPINS):
            await asyncio.sleep(0)
        return task

    async def settled(self) -> None:
        """Returns when whatever can go on has gone on."""
        await asyncio.sleep(SETTLED_S)

    def mend(self) -> None:
        """What comes now meets nothing unusual."""
        fresh = Gate(AdmissionSettings(grant_secret=SECRET))
        self.gate.found, self.gate.fetched = fresh.found, fresh.fetched
        self.log.left, self.books.ours = 1_000, True

    async def _handle(self, record: Record) -> None:
        try:
            await self._admission.handle(record)
        except (LeftUndone, HeadraceError):
            return

    def of(self, kind: type[InferenceAdmitted | InferenceRejected]) -> set[str]:
        return {event.request_id for topic, event in self.log.events if topic != TOKENS and isinstance(event, kind)}

    def full(self) -> set[str]:
        """Who heard that too many wait already."""
        said = f"no more than {DEPTH} may"
        refusals = [
            event for topic, event in self.log.events if topic == TOKENS and isinstance(event, InferenceRejected)
        ]
        return {event.request_id for event in refusals if said in event.message}


@pytest.fixture
async def tier(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tier]:
    monkeypatch.setattr("decisions.turnstile.share", lambda *_: SHARE)
    monkeypatch.setattr("streams.turnstile.FREE_MAX", 0)
    found = Tier()
    yield found
    found.turnstile.close()


async def test_who_is_still_decided_has_a_place_before_those_who_are_held_back(tier: Tier) -> None:
    tier.gate.closed = True
    asked = [(await tier.ask())[0] for _ in range(DEPTH + SHARE)]
    tier.gate.open()
    await tier.settled()
    assert tier.of(InferenceAdmitted) == set(asked[:SHARE])
    assert tier.full() == set(asked[DEPTH:])


async def test_who_is_fetched_has_a_place_that_nobody_takes_meanwhile(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decisions.turnstile.share", lambda *_: DEPTH)
    tier.gate.closed = True
    large, _ = await tier.ask(by_reference=True)
    small = [(await tier.ask())[0] for _ in range(DEPTH)]
    tier.gate.open()
    await tier.settled()
    assert tier.of(InferenceAdmitted) == {large, *small[:-1]}
    assert tier.full() == {small[-1]}


async def test_who_was_held_back_keeps_its_place_while_it_is_decided(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(await tier.ask())[0] for _ in range(DEPTH)]
    tier.gate.closed = True
    monkeypatch.setattr("decisions.turnstile.share", lambda *_: DEPTH + 1)
    await tier.settled()
    late, _ = await tier.ask()
    tier.gate.open()
    await tier.settled()
    assert tier.of(InferenceAdmitted) == set(asked)
    assert tier.full() == {late}


async def test_who_was_fetched_and_is_held_back_has_one_place_whoever_came_meanwhile(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decisions.turnstile.share", lambda *_: 0)
    tier.gate.closed = True
    large, _ = await tier.ask(by_reference=True)
    pool, queues = pool_name("m", "v1"), tier.books.accounts.queues
    for number in range(DEPTH):
        queues.add(pool, "other", str(number))  # as another process has let them in
    tier.gate.open()
    await tier.settled()
    assert tier.turnstile.holds("acme", large) is not None
    queues.forget("other")
    more = [(await tier.ask())[0] for _ in range(DEPTH)]
    assert tier.full() == {more[-1]}


async def test_what_is_being_written_has_one_place_and_not_two(tier: Tier) -> None:
    tier.log.takes.clear()
    asked = [(await tier.ask())[0] for _ in range(DEPTH)]
    tier.log.takes.set()
    await tier.settled()
    assert tier.of(InferenceAdmitted) == set(asked[:SHARE])
    assert not tier.full()


def _no_tokens() -> tuple[int, ...]:
    raise HeadraceError(Reason.INVALID_REQUEST, "no tokens")


def _bug() -> tuple[int, ...]:
    raise LookupError("a bug")


def _gone(_rid: str) -> InferenceRequested:
    raise PayloadUnreadable(Reason.PAYLOAD_LOST, "it is gone", REFERENCE)


async def refused(tier: Tier, _task: Task) -> None:
    tier.gate.found = _no_tokens


async def failed(tier: Tier, _task: Task) -> None:
    tier.gate.found = _bug


async def stopped(_tier: Tier, task: Task) -> None:
    task.cancel()


async def lost(tier: Tier, _task: Task) -> None:
    tier.gate.fetched = _gone


async def revoked(tier: Tier, _task: Task) -> None:
    """Its partition is another's, and soon ours again."""
    tier.turnstile.revoked({0})
    tier.books.ours = False


async def not_taken(tier: Tier, _task: Task) -> None:
    """The log takes nothing of it."""
    tier.log.left = 0


Way = Callable[[Tier, Task], Awaitable[None]]


@pytest.mark.parametrize(
    ("way", "by_reference"),
    [
        *((way, large) for way in (refused, failed, stopped, revoked, not_taken) for large in (False, True)),
        (lost, True),
    ],
)
async def test_whatever_becomes_of_it_its_place_is_free_again(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, way: Way, *, by_reference: bool
) -> None:
    monkeypatch.setattr("decisions.turnstile.share", lambda *_: DEPTH + 1)
    monkeypatch.setattr("streams.outbox.BACKOFF_S", 0.0)
    tier.gate.closed = True
    first, task = await tier.ask(by_reference=by_reference)
    await way(tier, task)
    tier.gate.open()
    await asyncio.wait({task}, timeout=WAIT_S)
    assert task.done()
    tier.mend()
    asked = [(await tier.ask())[0] for _ in range(DEPTH + 1)]
    await tier.settled()
    assert tier.of(InferenceAdmitted) == set(asked[:-1])
    assert tier.full() == {asked[-1]}
    assert first not in tier.full()


async def test_who_is_held_back_and_cancelled_leaves_its_place(tier: Tier) -> None:
    asked = [(await tier.ask())[0] for _ in range(DEPTH)]
    await tier.tell(InferenceCancelled(asked[-1]))
    more = [(await tier.ask())[0] for _ in range(2)]
    await tier.settled()
    assert tier.full() == {more[1]}
