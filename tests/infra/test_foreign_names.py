"""A record with a header name that is no UTF-8 stops nobody: what stands before and after it is read."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.producer import message_accumulator
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c_py

from infra.kafka import make_consumer, make_producer
from infra.read import read_to_end
from infra.settings import KafkaSettings

NAME = "a-header-name"
CRC_OFFSET, ATTRIBUTES_OFFSET = 17, 21  # of a version 2 batch


class ForeignBuilder:
    """Builds a batch like aiokafka's, then puts bytes that are no UTF-8 in the place of a header's name."""

    def __init__(self, *args, **kwargs) -> None:
        self._real = DefaultRecordBatchBuilder(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def build(self) -> bytes:
        batch = bytearray(self._real.build())
        place = batch.find(NAME.encode())
        if place >= 0:
            batch[place : place + 2] = b"\xff\xfe"
            crc = calc_crc32c_py(memoryview(batch)[ATTRIBUTES_OFFSET:])
            batch[CRC_OFFSET:ATTRIBUTES_OFFSET] = crc.to_bytes(4, "big")
        return bytes(batch)


@pytest.fixture
async def poisoned(kafka: KafkaSettings, topic_of, monkeypatch) -> str:
    """Partition 0: two good batches, a batch of good, bad and good, and a good one."""
    monkeypatch.setattr(message_accumulator, "DefaultRecordBatchBuilder", ForeignBuilder)
    topic = str(await topic_of(kafka))
    producer = make_producer(kafka, enable_idempotence=False)
    await producer.start()
    for value in (b"1", b"2"):
        await producer.send_and_wait(topic, value, partition=0)
    batch = producer.create_batch()
    batch.append(key=None, value=b"3", timestamp=None)
    batch.append(key=None, value=b"bad", timestamp=None, headers=[(NAME, b"x")])
    batch.append(key=None, value=b"lost", timestamp=None)
    batch.close()
    await (await producer.send_batch(batch, topic, partition=0))
    for partition in (0, 1):
        await producer.send_and_wait(topic, b"4", partition=partition)
    await producer.stop()
    return topic


async def test_a_reader_goes_on_after_the_batch(kafka: KafkaSettings, poisoned: str):
    records = [record async for record in read_to_end(kafka, poisoned)]
    assert [(record.offset, record.value) for record in records if record.partition == 0] == [
        (0, b"1"),
        (1, b"2"),
        (2, b"3"),
        (5, b"4"),
    ]
    assert [record.value for record in records if record.partition == 1] == [b"4"]


async def test_one_by_one_as_well(kafka: KafkaSettings, poisoned: str):
    consumer = make_consumer(kafka, poisoned)
    await consumer.start()
    try:
        found = [(await asyncio.wait_for(consumer.getone(), 20)).value for _ in range(5)]
    finally:
        await consumer.stop()
    assert sorted(found) == [b"1", b"2", b"3", b"4", b"4"]
