"""Whatever admission had written when it was killed, what is asked twice under one key is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka.structs import RecordMetadata, TopicPartition

from decisions.accounts import Accounts
from infra.grants import Grant, mint
from infra.log import EventDecoder
from infra.settings import AdmissionSettings
from schemas.codec import encode
from schemas.events import (
    InferenceAdmitted,
    InferenceJoined,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    ModelVersionRegistered,
    RequestKeyed,
    TenantChanged,
)
from schemas.parts import ApiKey, Reply
from schemas.topics import GRANT_HEADER, LIFECYCLE, TOKENS, idempotency_topic
from streams.admission import Admission
from streams.cache import ResponseCache
from streams.faust_shell import Record
from streams.lease import Lease
from streams.turnstile import Turnstile
from tests.decisions.worlds import NOW, WORK
from tests.streams.bytes_taken import BytesTaken
from tests.streams.test_admission_late import REQUESTS, SECRET, SESSION_MS, Books, Tokenizers, World

KEYS = idempotency_topic("interactive")
IDS = [f"01900000-0000-7000-8000-{number:012d}" for number in range(4)]
WRITES = 4
"""So many records are written for a request that is let in, and for its repeat, at most."""


class Killed(BaseException):
    """kill -9."""


class Log(BytesTaken):
    """What is written, in order. After so many records the writer is dead."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.left = 1_000

    async def send(self, topic: str, event: Any, **_more: Any) -> asyncio.Future[RecordMetadata]:
        if not self.left:
            raise Killed
        self.left -= 1
        self.events.append((topic, event))
        await asyncio.sleep(0)
        confirmed: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        place = TopicPartition(topic, 0)
        confirmed.set_result(RecordMetadata(topic, 0, place, len(self.events), NOW, 0, 0))
        return confirmed

    def of(self, topic: str, kind: type) -> list[Any]:
        return [event for name, event in self.events if name == topic and isinstance(event, kind)]


class Models(dict[str, ModelVersionRegistered]):
    def version(self, model: str, _version: str) -> ModelVersionRegistered | None:
        return self.get(model)


class Ledger(Books):
    """As a newcomer has it who has read the log."""

    def __init__(self, log: Log, *, remembers: bool = True, recalls: bool = True) -> None:
        super().__init__(goes=False)
        for offset, event in enumerate(log.of(LIFECYCLE, object) if recalls else ()):
            self.accounts.apply(offset, NOW, event)
        for event in log.of(KEYS, RequestKeyed) if remembers else ():
            self.accounts.keys.hear(event)

    async def remembers(self, _partition: int, _accounts: Accounts) -> bool:
        return True


def record(number: int, reply: Reply, **asked: Any) -> Record:
    grant = mint(SECRET, Grant("acme", "k1", ("interactive",), reply, NOW + 60_000))
    given: dict[str, Any] = {"request_id": IDS[number], "model": "m", "prompt": "hey", "idempotency_key": "k"}
    value = encode(InferenceRequested(**given | asked))
    return Record(REQUESTS, 0, number, NOW + number, b"acme", value, ((GRANT_HEADER, grant.encode()),))


async def handle(log: Log, books: Books, records: Sequence[Record]) -> None:
    """One life of admission: what it handles at once, as far as it comes."""
    settings, lease = AdmissionSettings(grant_secret=SECRET), Lease(SESSION_MS, lambda: NOW)
    lease.proved()
    world: Any = World(books.accounts)
    world.tenants["acme"] = TenantChanged("acme", "salt", (ApiKey("k1", "0" * 64, ("interactive",), 0),), 0)
    world.models, world.topics["tokens.acme"] = Models(world.models), 2
    decoder = EventDecoder(settings.kafka)
    parts: Any = (
        log,
        decoder,
        world,
        Tokenizers(),
        books,
        lease,
        Turnstile(world, "interactive", 10_000),
        ResponseCache(settings, world, decoder),
    )
    admission = Admission(settings, *parts)
    handled = [asyncio.ensure_future(_survive(admission.handle(each))) for each in records]
    await asyncio.gather(*handled)


async def _survive(work: Any) -> None:
    try:
        await work
    except Killed:
        return


DOOR, OWN = Reply(TOKENS, 1), Reply("tokens.acme", 0)


@pytest.mark.parametrize("killed_after", range(2 * WRITES + 1))
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("replies", [(DOOR, DOOR), (DOOR, OWN), (OWN, OWN)])
async def test_killed_after_any_write(killed_after: int, turned: bool, replies: tuple[Reply, Reply]) -> None:
    """Both records come again, in either order: neither was committed."""
    log = Log()
    records = [record(number, reply) for number, reply in enumerate(replies)]
    log.left = killed_after
    await handle(log, Ledger(log), records)
    log.left = 1_000
    await handle(log, Ledger(log), records[::-1] if turned else records)
    first = {event.request_id for event in log.of(WORK, InferenceScheduled)}
    assert len(first) == 1, "computed twice"
    joined = log.of(LIFECYCLE, InferenceJoined)
    assert {event.first_request_id for event in joined} == first
    assert {event.request_id for event in joined} == {IDS[0], IDS[1]} - first
    assert {event.request_id for event in log.of(KEYS, RequestKeyed)} == first
    assert {event.request_id for event in log.of(LIFECYCLE, InferenceAdmitted)} == first
    (answer,) = {event.first_reply for event in joined}
    assert answer == replies[IDS.index(first.pop())]


async def test_a_newcomer_that_reads_no_lifecycle_knows_it_by_the_keys_alone() -> None:
    """What is committed isn't read there again."""
    log = Log()
    await handle(log, Ledger(log), [record(0, DOOR)])
    assert [topic for topic, _ in log.events] == [LIFECYCLE, WORK, KEYS], "told before it is sent"
    assert log.events[0][1].valid_until_ms
    await handle(log, Ledger(log, recalls=False), [record(1, DOOR)])
    assert len(log.of(WORK, InferenceScheduled)) == 1
    (joined,) = log.of(TOKENS, InferenceJoined)
    assert (joined.first_request_id, joined.first_requested_ms, joined.requested_ms) == (IDS[0], NOW, NOW + 1)


@pytest.mark.parametrize("recalls", [False, True])
async def test_an_id_that_a_direct_producer_repeats_joins_its_own_stream(recalls: bool) -> None:
    """Also long after it was let in, and from another partition of his; not if it asks something else."""
    log = Log()
    await handle(log, Ledger(log), [record(0, OWN, idempotency_key="")])
    elsewhere = Reply("tokens.acme", 1)
    again = [
        record(1, OWN, request_id=IDS[0], idempotency_key=""),
        record(2, elsewhere, request_id=IDS[0], idempotency_key=""),
        record(3, elsewhere, request_id=IDS[0], idempotency_key="", prompt="ho"),
    ]
    books = Ledger(log, recalls=recalls)
    for each in again:
        await handle(log, books, [each])
    assert len(log.of(WORK, InferenceScheduled)) == 1
    joined = log.of("tokens.acme", InferenceJoined)
    assert [(event.request_id, event.first_request_id, event.first_reply) for event in joined] == [
        (IDS[0], IDS[0], OWN)
    ] * 2
    (refused,) = log.of("tokens.acme", InferenceRejected)
    assert (refused.reason, refused.param) == ("conflict", "request_id")
    assert not log.of(LIFECYCLE, InferenceRejected), "the first's reservation stands"


async def test_another_id_with_another_question_in_the_firsts_own_place_ends_no_stream() -> None:
    log = Log()
    books = Ledger(log)
    await handle(log, books, [record(0, OWN, idempotency_key="")])
    await handle(log, books, [record(1, OWN, request_id=IDS[0], idempotency_key="", prompt="ho")])
    assert not log.of("tokens.acme", InferenceRejected)
    assert len(log.of(WORK, InferenceScheduled)) == 1


async def test_a_conflict_is_refused_and_uses_up_nothing() -> None:
    log = Log()
    books = Ledger(log)
    await handle(log, books, [record(0, DOOR), record(1, DOOR, prompt="ho")])
    assert len(log.of(WORK, InferenceScheduled)) == 1
    (refused,) = log.of(TOKENS, InferenceRejected)
    assert (refused.request_id, refused.reason, refused.param) == (IDS[1], "conflict", "idempotency_key")
    assert refused.decisions[-1].check == "idempotency"
    assert log.of(LIFECYCLE, InferenceRejected) == [refused]
    assert books.accounts.counters("acme")[""].running == 1


async def test_what_was_refused_is_decided_anew() -> None:
    log = Log()
    books = Ledger(log)
    await handle(log, books, [record(0, DOOR, timeout_ms=0)])
    assert not log.of(WORK, InferenceScheduled)
    await handle(log, books, [record(1, DOOR), record(2, DOOR)])
    assert len({event.request_id for event in log.of(WORK, InferenceScheduled)}) == 1
    assert len(log.of(TOKENS, InferenceJoined)) == 1


async def test_without_a_key_nothing_is_remembered_or_waited_for() -> None:
    log = Log()
    await handle(log, Books(goes=False), [record(0, DOOR, idempotency_key="")])
    assert {topic for topic, _ in log.events} == {LIFECYCLE, WORK}
    (admitted,) = log.of(LIFECYCLE, InferenceAdmitted)
    assert (admitted.keyed, admitted.valid_until_ms) == (None, 0)
