"""Where a topic ends is no record: a transaction's marker, a gap that compaction left, or nothing at all. Reading stops there all the same."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import RecordsToDelete

from infra.kafka import make_admin, make_consumer, make_producer
from infra.read import assign_all, reached, read_to_end
from infra.settings import KafkaSettings
from infra.topics import ensure
from infra.views import View
from schemas.codec import encode
from schemas.events import Event, InferenceCancelled
from schemas.topics import TopicSpec

WAIT_S = 10.0
CLEANED_S_MAX = 60.0
RECORDS = 4

Ends = Callable[[KafkaSettings, str], Awaitable[None]]


def record(name: str) -> bytes:
    return encode(InferenceCancelled(name, "t"))


async def written(kafka: KafkaSettings, topic: str, *names: str) -> None:
    async with make_producer(kafka) as producer:
        for name in names:
            await producer.send_and_wait(topic, record(name), name.encode(), 0)


async def empty(_kafka: KafkaSettings, _topic: str) -> None:
    """Nothing was ever written."""


async def committed(kafka: KafkaSettings, topic: str) -> None:
    """A transaction's commit is the last thing there."""
    await written(kafka, topic, "a")
    async with make_producer(kafka, transactional_id=uuid.uuid4().hex) as producer, producer.transaction():
        await producer.send_and_wait(topic, record("z"), b"z", 0)


async def aborted(kafka: KafkaSettings, topic: str) -> None:
    """A transaction's abort is; what it wrote is there for those who read what isn't committed."""
    await written(kafka, topic, "a")
    async with make_producer(kafka, transactional_id=uuid.uuid4().hex) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, record("z"), b"z", 0)
        await producer.abort_transaction()


async def deleted(kafka: KafkaSettings, topic: str) -> None:
    """Retention took every record."""
    await written(kafka, topic, *(f"r{number}" for number in range(RECORDS)))
    admin = make_admin(kafka)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=RECORDS)})
    finally:
        await admin.close()


async def only_a_marker(kafka: KafkaSettings, topic: str) -> None:
    """Retention took all but the marker."""
    await committed(kafka, topic)
    admin = make_admin(kafka)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=2)})
    finally:
        await admin.close()


ENDS: list[tuple[Ends, list[str]]] = [
    (empty, []),
    (committed, ["a", "z"]),
    (aborted, ["a", "z"]),
    (deleted, []),
    (only_a_marker, []),
]


@pytest.mark.parametrize(("end", "names"), ENDS, ids=[end.__name__ for end, _ in ENDS])
async def test_reading_stops_there(kafka: KafkaSettings, topic_of, end: Ends, names: list[str]):
    topic = await topic_of(kafka)
    await end(kafka, topic)
    seen: list[str] = []

    def apply(event: Event, _record: ConsumerRecord) -> None:
        assert isinstance(event, InferenceCancelled)
        seen.append(event.request_id)

    view = View(kafka, topic, apply)
    async with asyncio.timeout(WAIT_S):
        await view.start()
    assert seen == names
    async with asyncio.timeout(WAIT_S):
        assert len([each async for each in read_to_end(kafka, topic)]) == len(names)

    await written(kafka, topic, "after")
    assert await view.until(lambda: seen == [*names, "after"], WAIT_S)
    await view.stop()


async def test_reading_stops_behind_gaps_of_compaction(kafka: KafkaSettings):
    """Really compacted: only the last record of a key is left, and beyond it a marker."""
    topic = f"test-{uuid.uuid4().hex[:8]}"
    await ensure(kafka, [TopicSpec(topic, 1, "id", compacted=True)])
    await _soon_compacted(kafka, topic)
    await written(kafka, topic, *("same" for _ in range(20)))
    await committed(kafka, topic)
    await asyncio.sleep(0.2)  # older than the segment's age, so that the next record opens a new one
    async with make_producer(kafka, transactional_id=uuid.uuid4().hex) as producer, producer.transaction():
        await producer.send_and_wait(topic, record("z"), b"z", 0)

    consumer: AIOKafkaConsumer = make_consumer(kafka)
    await consumer.start()
    try:
        async with asyncio.timeout(CLEANED_S_MAX):
            while len(found := [each async for each in read_to_end(kafka, topic)]) > 5:  # noqa: ASYNC110  # the broker tells nobody
                await asyncio.sleep(0.5)
        assert {each.key for each in found} == {b"same", b"a", b"z"}
        ends = await assign_all(consumer, topic)
        async with asyncio.timeout(WAIT_S):
            while not await reached(consumer, ends):
                await consumer.getmany(timeout_ms=100)
    finally:
        await consumer.stop()


async def _soon_compacted(kafka: KafkaSettings, topic: str) -> None:
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

    wanted = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    admin = make_admin(kafka)
    await admin.start()
    try:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=wanted)])
    finally:
        await admin.close()
