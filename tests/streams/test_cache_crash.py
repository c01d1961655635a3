"""A hit and a crash: what was decided is told again, by the cache if it still has it, else by the worker; it costs no more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiokafka.structs import RecordMetadata, TopicPartition

from infra.answer_cache import Stored
from infra.grants import Grant, mint
from infra.log import EventDecoder, NotDelivered
from infra.settings import AdmissionSettings
from schemas.codec import encode
from schemas.events import (
    ChoiceAnswer,
    InferenceAdmitted,
    InferenceAnswered,
    InferenceRequested,
    InferenceScheduled,
    ModelVersionRegistered,
    Quota,
    Reply,
    Sampling,
    Usage,
)
from schemas.topics import GRANT_HEADER, LIFECYCLE, TOKENS
from streams import outbox
from streams.admission import Admission
from streams.cache import ResponseCache
from streams.faust_shell import Record
from streams.lease import Lease
from streams.turnstile import Turnstile
from tests.decisions.worlds import ID, NOW, WORK
from tests.streams.bytes_taken import BytesTaken
from tests.streams.test_admission_late import REQUESTS, SECRET, Books, Tokenizers, World

GREEDY = Sampling(temperature=0.0, max_tokens=10)
ANSWER = InferenceAnswered(ID, "acme", "m", "v1", "interactive", (ChoiceAnswer(0, (7,), "x", "stop"),), Usage(3, 1))


class Producer(BytesTaken):
    """The log, which may be away for what is written together."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.events: list[Any] = []
        self.away = False

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def send(self, topic: str, event: Any, **_more: Any) -> asyncio.Future[RecordMetadata]:
        self.topics.append(topic)
        self.events.append(event)
        taken: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        taken.set_result(RecordMetadata(topic, 0, TopicPartition(topic, 0), 0, NOW, 0, 0))
        return taken

    async def send_together(self, topic: str, events: Any, **more: Any) -> asyncio.Future[RecordMetadata]:
        if self.away:
            raise NotDelivered("the log is away")
        self.events.extend(events)
        return await self.send(topic, None, **more)


class Models(dict[str, ModelVersionRegistered]):
    """The directory of models, each with one version."""

    def version(self, model: str, _version: str) -> ModelVersionRegistered | None:
        return self.get(model)


class Bench:
    def __init__(self, *quotas: Quota) -> None:
        self.settings = AdmissionSettings(grant_secret=SECRET)
        self.books = Books(goes=False)
        self.producer = Producer()
        self.decoder = EventDecoder(self.settings.kafka)
        self.world = World(self.books.accounts)
        self.world.models = Models({"m": replace(self.world.models["m"], cache_ttl_ms=60_000)})
        self.world.tenants["acme"] = replace(self.world.tenants["acme"], quotas=quotas)
        self.restart()

    def restart(self) -> None:
        """Another process: with an empty cache."""
        world: Any = self.world
        self.cache = ResponseCache(self.settings, world, self.decoder)
        lease = Lease(6_000, lambda: NOW)
        lease.proved()
        turnstile = Turnstile(world, "interactive", 10_000)
        parts: Any = (self.producer, self.decoder, world, Tokenizers(), self.books, lease, turnstile, self.cache)
        self.admission = Admission(self.settings, *parts)

    async def handle(self, rid: str = ID, offset: int = 7) -> None:
        grant = mint(SECRET, Grant("acme", "k1", ("interactive",), Reply(TOKENS, 1), NOW + 60_000))
        value = encode(InferenceRequested(rid, "m", prompt="hey", sampling=GREEDY))
        headers = ((GRANT_HEADER, grant.encode()),)
        await self.admission.handle(Record(REQUESTS, 0, offset, NOW, b"acme", value, headers))

    async def keep(self) -> None:
        """Answer what was scheduled last, and put that into the cache."""
        work = self.producer.of(InferenceScheduled)[-1]
        await self.cache._store.put("m", work.cache_key, Stored(encode(ANSWER), NOW - 5), 60_000, 1 << 20)

    def told(self) -> None:
        """The log has the admissions."""
        for offset, event in enumerate(self.producer.of(InferenceAdmitted)):
            self.books.accounts.apply(offset, NOW, event)


OTHER_ID = "01900000-0000-7000-8000-000000000001"


@pytest.mark.parametrize("quotas", [(), (Quota("interactive", concurrent_requests=2, requests_per_minute=2),)])
async def test_a_hit_that_crashes_half_way_is_told_again_by_the_cache_or_by_a_worker(
    quotas: tuple[Quota, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "BACKOFF_S", 0.0)
    bench = Bench(*quotas)
    await bench.handle(OTHER_ID, 6)
    assert len(bench.producer.of(InferenceScheduled)) == 1
    await bench.keep()

    bench.producer.away = True
    with pytest.raises(NotDelivered):
        await bench.handle()
    bench.told()
    admitted = bench.producer.of(InferenceAdmitted)[-1]
    assert (admitted.cached, admitted.reserved_tokens) == (True, 0)
    assert bench.books.accounts.counters("acme")[""].running == 1

    bench.producer.away = False
    del bench.producer.events[:]
    await bench.handle()
    assert [type(event).__name__ for event in bench.producer.events] == [
        "GenerationTakenOver", "GenerationStarted", "TokensGenerated", "InferenceCompleted", "NoneType",
    ]  # fmt: skip

    bench.restart()
    del bench.producer.events[:]
    await bench.handle()
    (work,) = bench.producer.events
    assert isinstance(work, InferenceScheduled)
    assert bench.producer.topics[-1] == admitted.work_topic == WORK
    assert bench.books.accounts.counters("acme")[""].running == 1


@pytest.mark.parametrize("quotas", [(), (Quota("interactive", requests_per_minute=2),)])
async def test_nothing_is_told_before_its_admission(quotas: tuple[Quota, ...]) -> None:
    bench = Bench(*quotas)
    await bench.handle(OTHER_ID, 6)
    await bench.keep()
    del bench.producer.topics[:]
    await bench.handle()
    assert bench.producer.topics == [LIFECYCLE, TOKENS]
