"""What workers would tell of themselves, where a benchmark has none: so that placement and early refusal have as much to read as they have at work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from aiokafka import AIOKafkaConsumer, TopicPartition

from decisions.placement import READY
from infra.kafka import make_consumer, partitions_of
from infra.log import EventProducer
from infra.settings import KafkaSettings
from schemas.events import PartitionReport, WorkerReported
from schemas.topics import WORKERS, work_topic

COUNT = 4
EVERY_S = 1.0
SERVICE_MS, START_UP_MS = 200.0, 1_000


@contextlib.asynccontextmanager
async def reported(
    kafka: KafkaSettings, producer: EventProducer, served: tuple[str, str, str], slots: int
) -> AsyncIterator[None]:
    """While the block runs, `COUNT` workers say every second that they are ready for a model, version and tier, have `slots` each, and have finished all
    that was in their partitions a moment ago.
    """
    reports = _Reports(producer, served, slots)
    consumer = make_consumer(kafka)
    await consumer.start()
    try:
        await reports.send(consumer)
        keeping = asyncio.create_task(reports.keep_on(consumer))
        try:
            yield
        finally:
            keeping.cancel()
            (ended,) = await asyncio.gather(keeping, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended  # what was measured since had no reports
        await reports.withdraw()
    finally:
        await consumer.stop()


class _Reports:
    def __init__(self, producer: EventProducer, served: tuple[str, str, str], slots: int) -> None:
        self._producer = producer
        self._model, self._version, self._tier = served
        self._topic = work_topic(*served)
        self._slots = slots
        self._started_ms = int(time.time() * 1000)
        self._names = [f"reported-{number}-of-{self._topic}" for number in range(COUNT)]

    async def keep_on(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.send(consumer)

    async def send(self, consumer: AIOKafkaConsumer) -> None:
        numbers = await partitions_of(consumer, self._topic)
        ends = await consumer.end_offsets([TopicPartition(self._topic, number) for number in numbers])
        held = [PartitionReport(place.topic, place.partition, end, 0) for place, end in sorted(ends.items())]
        for number, name in enumerate(self._names):
            event = WorkerReported(
                name,
                self._model,
                self._version,
                READY,
                tuple(held[number::COUNT]),
                self._slots,
                running=0,
                waiting=0,
                started_ms=self._started_ms,
                service_ms=SERVICE_MS,
                start_up_ms=START_UP_MS,
                tiers=(self._tier,),
            )
            await self._producer.send_and_wait(WORKERS, event, key=name)

    async def withdraw(self) -> None:
        for name in self._names:
            await (await self._producer.send_raw(WORKERS, None, name.encode()))
