"""Records are read again by their offsets, wherever they lie, and what the log has no more isn't waited for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest
from aiokafka import TopicPartition
from aiokafka.admin.records_to_delete import RecordsToDelete

from infra.kafka import make_admin
from infra.log import EventProducer
from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.topics import HOUR_MS, TopicSpec
from streams.rereading import GAP_MAX, Rereading

pytestmark = pytest.mark.kafka
RECORDS, BEGINNING = 4 * GAP_MAX, 100


@pytest.fixture
async def topic(kafka: KafkaSettings) -> AsyncIterator[str]:
    """Of two partitions, with so many records each; a record's value is its number."""
    name = f"again-{secrets.token_hex(4)}"
    await ensure(kafka, [TopicSpec(name, 2, "none", HOUR_MS)])
    producer = EventProducer(kafka, "test")
    await producer.start()
    try:
        sent = [
            await producer.send_raw(name, str(number // 2).encode(), partition=number % 2)
            for number in range(2 * RECORDS)
        ]
        await asyncio.gather(*sent)
        yield name
    finally:
        await producer.stop()


@pytest.fixture
async def rereading(kafka: KafkaSettings, topic: str) -> AsyncIterator[Rereading]:
    """Of that topic."""
    made = Rereading(kafka, topic)
    yield made
    await made.close()


async def found(rereading: Rereading, partition: int, *offsets: int) -> list[int]:
    records = await rereading.read(partition, offsets)
    assert [record.value for record in records] == [str(record.offset).encode() for record in records]
    assert {record.partition for record in records} <= {partition}
    return [record.offset for record in records]


async def test_neighbours_and_what_lies_far_apart_come_in_order(rereading: Rereading) -> None:
    far = [3, 4, 5, 9, 2 * GAP_MAX, RECORDS - 1]
    assert await found(rereading, 0, *far) == far
    assert await found(rereading, 1, 7, 6) == [6, 7]
    assert await found(rereading, 0, *range(GAP_MAX + 50)) == list(range(GAP_MAX + 50))
    assert await found(rereading, 0, GAP_MAX + 50) == [GAP_MAX + 50]
    await rereading.close()
    assert await found(rereading, 0, 3) == [3]


async def test_what_the_log_has_no_more_is_left_out(
    kafka: KafkaSettings, topic: str, rereading: Rereading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.rereading.STALL_S", 1.0)
    admin = make_admin(kafka)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=BEGINNING)})
    finally:
        await admin.close()
    assert await found(rereading, 0, 5, BEGINNING - 1, BEGINNING, RECORDS + 5) == [BEGINNING]
    assert await found(rereading, 0, 5) == []
    assert await found(rereading, 1, 5) == [5]
