"""Members of a real group come and go in the middle of a flood, which fills the queue between the consumer and what handles: no record is lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from pathlib import Path

import pytest
from aiokafka import TopicPartition

from infra.kafka import make_consumer
from infra.log import EventProducer
from infra.settings import AdmissionSettings, KafkaSettings
from infra.topics import ensure
from schemas.topics import HOUR_MS, TopicSpec
from streams.faust_shell import FaustShell, Record

pytestmark = pytest.mark.kafka
PARTITIONS, RECORDS, OPEN_MAX = 4, 8_000, 32
STEP_S, WAIT_S = 0.02, 90.0


async def test_what_was_queued_when_a_member_came_or_went_is_handled_once_more_by_whoever_has_it(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    name = f"rebalanced-{secrets.token_hex(4)}"
    await ensure(kafka, [TopicSpec(name, PARTITIONS, "none", HOUR_MS)])
    done: dict[str, Counter[tuple[int, int]]] = {"first": Counter(), "second": Counter()}

    def member(who: str) -> FaustShell:
        async def handle(record: Record) -> None:
            await asyncio.sleep(STEP_S)
            done[who][record.partition, record.offset] += 1

        settings = AdmissionSettings(kafka=kafka, data_dir=tmp_path / who)
        return FaustShell(settings, name, name, handle, OPEN_MAX)

    async def until(who: str, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while done[who].total() < count:  # noqa: ASYNC110
                await asyncio.sleep(STEP_S)

    producer = EventProducer(kafka, "test")
    async with contextlib.AsyncExitStack() as cleanup:
        await producer.start()
        cleanup.push_async_callback(producer.stop)
        sent = [await producer.send_raw(name, b"x", partition=number % PARTITIONS) for number in range(RECORDS)]
        await asyncio.gather(*sent)
        first, second = member("first"), member("second")
        await first.start()
        cleanup.push_async_callback(first.stop)
        await until("first", RECORDS // 10)
        await second.start()
        cleanup.push_async_callback(second.stop)
        await until("second", RECORDS // 10)
        await second.stop()
        async with asyncio.timeout(WAIT_S):
            while len(done["first"] | done["second"]) < RECORDS:  # noqa: ASYNC110
                await asyncio.sleep(STEP_S)
        assert not first.failed.done()
        assert not second.failed.done()
        await _committed(kafka, name)


async def _committed(kafka: KafkaSettings, name: str) -> None:
    """Returns when the group has committed the end of each partition."""
    consumer = make_consumer(kafka, group=name)
    await consumer.start()
    try:
        places = [TopicPartition(name, number) for number in range(PARTITIONS)]
        async with asyncio.timeout(WAIT_S):
            while [await consumer.committed(place) for place in places] != [RECORDS // PARTITIONS] * PARTITIONS:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    finally:
        await consumer.stop()
