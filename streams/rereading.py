"""Reads records of one topic again, by their offsets: for those whose place is known and whose content was let go."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from infra.kafka import make_consumer, stop_consumer
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.reasons import Reason

GAP_MAX = 512
"""What lies between two records that are wanted is read over; of more than that, passed by."""
FETCH_BYTES_MAX = 512 * 1024
POLL_MS = 200
FETCH_WAIT_MS = 100
STALL_S = 10.0

log = structlog.get_logger("streams.rereading")


class Rereading:
    """A consumer without a group, which exists while somebody reads. One `read` at a time."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._consumer: AIOKafkaConsumer | None = None
        self._place: TopicPartition | None = None
        self._next: int | None = None

    async def read(self, partition: int, offsets: Iterable[int]) -> list[ConsumerRecord]:
        """The records at these offsets, in their order. Those that the log has no more are left out.

        Raises HeadraceError (unavailable) if the log can't be read at present.
        """
        try:
            return await self._read(TopicPartition(self._topic, partition), deque(sorted(offsets)))
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning("can't be read again", topic=self._topic, partition=partition, error=repr(error))
            await self.close()
            raise HeadraceError(Reason.UNAVAILABLE, f"{self._topic} can't be read again: {error!r}") from error

    async def _read(self, place: TopicPartition, wanted: deque[int]) -> list[ConsumerRecord]:
        consumer = await self._at(place)
        found: list[ConsumerRecord] = []
        loop = asyncio.get_running_loop()
        until_s = loop.time() + STALL_S
        while wanted:
            if self._next is None or not self._next <= wanted[0] <= self._next + GAP_MAX:
                consumer.seek(place, wanted[0])
                self._next = wanted[0]
            most = min(wanted[-1] - self._next, GAP_MAX) + 1
            try:
                batch = (await consumer.getmany(place, timeout_ms=POLL_MS, max_records=most)).get(place, ())
            except OffsetOutOfRangeError:  # below the log's beginning, or beyond its end
                batch, self._next = (), None
                await asyncio.sleep(POLL_MS / 1000)
            for record in batch:
                self._next = record.offset + 1
                while wanted and wanted[0] < record.offset:
                    wanted.popleft()
                if wanted and wanted[0] == record.offset:
                    wanted.popleft()
                    found.append(record)
            if batch:
                until_s = loop.time() + STALL_S
            else:
                await self._pass_lost(consumer, place, wanted, stalled=loop.time() > until_s)
        return found

    async def _pass_lost(
        self, consumer: AIOKafkaConsumer, place: TopicPartition, wanted: deque[int], *, stalled: bool
    ) -> None:
        """Nothing came: what is below the log's beginning never will, nor what is beyond its end for long. Raises TimeoutError if there is more."""
        begin, end = (await consumer.beginning_offsets([place]))[place], (await consumer.end_offsets([place]))[place]
        while wanted and wanted[0] < begin:
            wanted.popleft()
        while stalled and wanted and wanted[-1] >= end:
            wanted.pop()
        if stalled and wanted:
            raise TimeoutError

    async def _at(self, place: TopicPartition) -> AIOKafkaConsumer:
        if self._consumer is None:
            consumer = make_consumer(
                self._settings,
                auto_offset_reset="none",
                max_partition_fetch_bytes=FETCH_BYTES_MAX,
                fetch_max_wait_ms=FETCH_WAIT_MS,
            )
            self._consumer, self._place = consumer, None
            await consumer.start()
        if self._place != place:
            self._consumer.assign([place])
            self._place, self._next = place, None
        return self._consumer

    async def close(self) -> None:
        """Disconnect, until somebody reads again."""
        consumer, self._consumer, self._place, self._next = self._consumer, None, None, None
        if consumer is not None:
            await stop_consumer(consumer)
