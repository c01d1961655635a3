"""A bug in admission's own code: the record is put aside, its caller is told, and nothing else suffers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.structs import RecordMetadata, TopicPartition

from decisions.accounts import Accounts
from infra.grants import Grant, mint
from infra.log import EventDecoder, NotDelivered
from infra.settings import AdmissionSettings
from schemas.codec import encode
from schemas.errors import HeadraceError
from schemas.events import InferenceFailed, InferenceRejected, InferenceRequested, RecordDeadLettered, Reply
from schemas.topics import DEAD_LETTERS, GRANT_HEADER, LIFECYCLE, TOKENS, requests_topic
from streams.admission import Admission
from streams.cache import ResponseCache
from streams.faust_shell import Record
from streams.lease import Lease
from streams.turnstile import Turnstile
from tests.decisions.worlds import ID, NOW, FakeWorld

SECRET = b"s" * 32
REQUESTS = requests_topic("interactive")


class World(FakeWorld):
    """All that admission asks of the world, with a bug in how it looks for models."""

    counts: Any = None

    async def learn(self, _topic: str) -> None: ...

    async def meet(self, _tenant: str, _key_id: str) -> None: ...

    async def meet_model(self, model: str) -> None:
        raise LookupError(model)


class Books:
    """Ledgers in which nothing was ever written."""

    async def of(self, _partition: int) -> Accounts:
        return Accounts("interactive")


class Producer:
    """Takes every event, or none."""

    def __init__(self, *, away: bool = False) -> None:
        self.events: list[tuple[str, Any]] = []
        self.away = away

    async def send(self, topic: str, event: Any, **_more: Any) -> asyncio.Future[RecordMetadata]:
        if self.away:
            raise NotDelivered("the log is away")
        self.events.append((topic, event))
        confirmed: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        confirmed.set_result(RecordMetadata(topic, 0, TopicPartition(topic, 0), 0, NOW, 0, 0))
        return confirmed

    async def send_and_wait(self, topic: str, event: Any, **more: Any) -> RecordMetadata:
        return await (await self.send(topic, event, **more))


def admission_with(producer: Producer) -> Admission:
    settings = AdmissionSettings(grant_secret=SECRET)
    world: Any = World()
    world.topics[REQUESTS] = 1
    world.counts = world
    unused: Any = None
    ledgers: Any = Books()
    decoder = EventDecoder(settings.kafka)
    turnstile, cache = Turnstile(world, "interactive", 10_000), ResponseCache(settings, world, decoder)
    parts: Any = (producer, decoder, world, unused, ledgers, Lease(6_000), turnstile, cache)
    return Admission(settings, *parts)


def record(event: Any) -> Record:
    grant = mint(SECRET, Grant("acme", "k1", ("interactive",), Reply(TOKENS, 1), NOW + 60_000))
    return Record(REQUESTS, 0, 7, NOW, b"acme", encode(event), ((GRANT_HEADER, grant.encode()),))


async def test_the_caller_of_a_request_that_meets_a_bug_is_told() -> None:
    producer = Producer()
    await admission_with(producer).handle(record(InferenceRequested(ID, "m", prompt="secret words")))
    assert [topic for topic, _ in producer.events] == [TOKENS, TOKENS, LIFECYCLE, DEAD_LETTERS]
    refusal, taken_back, told, buried = (event for _, event in producer.events)
    assert isinstance(refusal, InferenceRejected)
    assert (refusal.request_id, refusal.reason) == (ID, "internal_error")
    assert refusal == told
    assert isinstance(taken_back, InferenceFailed) and taken_back.if_not_started, "should it have been let in before"
    assert isinstance(buried, RecordDeadLettered)
    assert buried.message == "LookupError in admission"


async def test_a_record_that_meets_a_bug_while_the_log_is_away_is_not_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.outbox.BACKOFF_S", 0.0)
    with pytest.raises(HeadraceError, match="away"):
        await admission_with(Producer(away=True)).handle(record(InferenceRequested(ID, "m", prompt="x")))
