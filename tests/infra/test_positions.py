"""Where a consumer stands, and where a time begins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndTimestamp

from infra.kafka import make_consumer, make_producer, partitions_of
from infra.positions import Since, handed_out, since
from infra.settings import KafkaSettings

TopicOf = Callable[[KafkaSettings], Awaitable[str]]


@pytest.mark.kafka
async def test_a_time_begins_at_its_first_record_or_at_the_end(kafka: KafkaSettings, topic_of: TopicOf) -> None:
    topic = await topic_of(kafka)
    written, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)
    async with make_producer(kafka) as producer:
        times = []
        for _ in range(3):
            times.append((await producer.send_and_wait(topic, b"", partition=0)).timestamp)
            await asyncio.sleep(0.01)  # the broker's clock tells them apart
    async with make_consumer(kafka) as consumer:
        await partitions_of(consumer, topic)
        places = [written, empty]
        assert await since(consumer, places, 0) == {written: Since(0, 3), empty: Since(0, 0)}
        assert await since(consumer, places, times[0] + 1) == {written: Since(1, 3), empty: Since(0, 0)}
        assert await since(consumer, places, times[2] + 1) == {written: Since(3, 3), empty: Since(0, 0)}
        assert await since(consumer, [], 0) == {}


@pytest.mark.parametrize("time_ms", [0, 10])
async def test_what_is_written_between_the_two_questions_is_not_passed_over(time_ms: int) -> None:
    place = TopicPartition("t", 0)

    class Growing:
        """A partition that gets a record of the time 5 after each question."""

        records = 3

        async def end_offsets(self, _places: Any) -> dict[TopicPartition, int]:
            self.records += 1
            return {place: self.records - 1}

        async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
            self.records += 1
            return {place: OffsetAndTimestamp(3, 5) if times[place] <= 5 else None}

    consumer: Any = Growing()
    assert await since(consumer, [place], time_ms) == {place: Since(3, 3)}


@pytest.mark.kafka
async def test_what_is_handed_out_is_known_without_waiting(kafka: KafkaSettings, topic_of: TopicOf) -> None:
    topic = await topic_of(kafka)
    place = TopicPartition(topic, 0)
    async with make_producer(kafka) as producer:
        for _ in range(3):
            await producer.send_and_wait(topic, b"", partition=0)
    async with make_consumer(kafka) as consumer:
        assert handed_out(consumer) == {}
        await partitions_of(consumer, topic)
        consumer.assign([place])
        consumer.seek(place, 1)
        assert handed_out(consumer) == {place: 1}
        records = (await consumer.getmany(timeout_ms=10_000, max_records=1))[place]
        assert [record.offset for record in records] == [1]
        assert handed_out(consumer) == {place: 2}
