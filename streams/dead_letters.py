"""Puts aside what can't be read on the topics whose own readers pass it over, and what doesn't belong there.

Many processes read these topics into memory, each at every start: what none of them can read is put aside by this reader alone. One aiokafka
consumer in the group `dead-letters`, in each `lifecycle` beside the clock, which it never stops. A partition's offset is committed only once
everything below it that had to be put aside is in `dead-letters`; a crash between the two writes a letter again, which readers take for the same
(`decisions.dead_letters.Letters`). Of `dead-letters` itself it only counts what can't be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from decisions.dead_letters import BELONGING, misplaced
from infra import metrics
from infra.dead_letters import dead_letter
from infra.kafka import Batching, make_consumer, stop_consumer
from infra.log import EventDecoder, EventProducer, RecordTooLarge
from infra.positions import handed_out, since
from infra.reach import until_reached
from infra.settings import LifecycleSettings
from schemas.errors import HeadraceError, Undecodable
from schemas.events import Event
from schemas.reasons import Reason
from schemas.topics import ANSWERS, DEAD_LETTERS, HOUR_MS, LIFECYCLE

PROCESS = "lifecycle"
GROUP = "dead-letters"
TOPICS = (*BELONGING, DEAD_LETTERS)
POLL_MS = 500
RECORDS_MAX = 200
"""So many are judged before what they are worth is committed, or may be;"""
JUDGED_BYTES_MAX = 64 * 1024
"""and so many bytes before others in the event loop have their turn."""
FETCH_WAIT_MS, FETCH_BYTES_MIN = 500, 256 * 1024
"""Nobody waits for a letter."""
PARTITION_BYTES_MAX = 1024 * 1024
"""A partition's share of one fetch: there are many partitions."""
READ_BACK_MS = 2 * HOUR_MS
"""How far a group without offsets reads back where a record a request is written: 30 days of them would take hours."""
RETRY_S = 5.0

log = structlog.get_logger("streams.dead_letters")


class Clerk(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Judges the records of the partitions that the group gives it."""

    def __init__(self, consumer: AIOKafkaConsumer, producer: EventProducer, decoder: EventDecoder) -> None:
        self._consumer = consumer
        self._producer = producer
        self._decoder = decoder
        self._judged: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._begun: set[TopicPartition] = set()
        self._unyielded = 0

    # --- partitions come and go --------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Commit what was judged, and forget."""
        try:
            await self.commit()
        except KafkaError as error:
            log.info("not committed; the next owner judges it again", error=type(error).__name__)
        finally:
            for place in list(revoked):
                self._begun.discard(place)
                self._judged.pop(place, None)
                self._committed.pop(place, None)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Begin where the group was; where it never was, not at the very beginning of what is written for each request."""
        long = [place for place in assigned if place.topic in (LIFECYCLE, ANSWERS)]
        new = [place for place in long if await self._consumer.committed(place) is None]
        if new:
            await self._begin(new)
        self._begun.update(assigned)

    async def _begin(self, new: list[TopicPartition]) -> None:
        recent = await since(self._consumer, new, int(time.time() * 1000) - READ_BACK_MS)
        for place in new:
            if place in self._consumer.assignment():
                self._consumer.seek(place, recent[place].start)

    # --- records -----------------------------------------------------------------------------------------------------

    async def take(self, place: TopicPartition, records: list[ConsumerRecord]) -> None:
        """Put aside those that have to be, at once; returns when the broker has the letters. Raises HeadraceError (retriable) if it hasn't."""
        judged = [(record, *await self._judge(record)) for record in records]
        faults = [self._put_aside(record, fault, event) for record, fault, event in judged if fault is not None]
        outcomes = await asyncio.gather(*faults, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if place in self._consumer.assignment():
            self._judged[place] = records[-1].offset + 1

    def pass_over(self) -> None:
        """To be told when all that was read was taken: what wasn't handed out by now, since no client can read it, is judged."""
        for place, position in handed_out(self._consumer).items():
            if place in self._begun and position > self._judged.get(place, 0):
                self._judged[place] = position

    async def _judge(self, record: ConsumerRecord) -> tuple[HeadraceError | None, Event | None]:
        """Why a record is put aside, and what it holds, if that can be read. Raises HeadraceError (unavailable) if its schema can't be looked up at present."""
        self._unyielded += len(record.value or b"")
        if self._unyielded > JUDGED_BYTES_MAX:
            self._unyielded = 0
            await asyncio.sleep(0)
        try:
            event = None if record.value is None else await self._decoder.decode_record(record.value)
            if record.topic == DEAD_LETTERS:
                return None, event
            why = misplaced(record.topic, record.key, event)
        except HeadraceError as error:
            if error.retriable:
                raise
            return error, None
        except Exception as error:  # whatever a record holds, those after it count
            return HeadraceError(Reason.INTERNAL_ERROR, f"{type(error).__name__} in {PROCESS}"), None
        return None if why is None else Undecodable(why), event

    async def _put_aside(self, record: ConsumerRecord, fault: HeadraceError, event: Event | None) -> None:
        log.warning("a record can't be read", topic=record.topic, partition=record.partition, offset=record.offset)
        if record.topic == DEAD_LETTERS:  # a letter about a letter would be the next one's reason
            metrics.PASSED_OVER.labels(DEAD_LETTERS).inc()
            return
        try:
            await dead_letter(self._producer, record, fault.reason.value, fault.message, PROCESS, event)
        except RecordTooLarge as error:  # the cluster takes less than what is kept of a record
            log.error("a record can't be put aside", error=error.message)
            metrics.PASSED_OVER.labels(record.topic).inc()

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit what is judged. If the group has moved on, the next owner judges it again. Raises KafkaError."""
        due = {place: offset for place, offset in self._judged.items() if self._committed.get(place) != offset}
        if not due:
            return
        try:
            await self._consumer.commit(due)
        except (CommitFailedError, IllegalStateError) as error:
            log.info("a commit came too late", error=type(error).__name__)
            return
        self._committed.update(due)


async def follow(settings: LifecycleSettings, producer: EventProducer, stop: asyncio.Event) -> None:
    """Put records aside until `stop` is set. Whatever goes wrong is tried again from what was committed."""
    decoder = EventDecoder(settings.kafka)
    while not stop.is_set():
        try:
            if await until_reached(settings.kafka, TOPICS, stop, lambda _missing: None):
                await _read(settings, producer, decoder, stop)
        except (
            Exception
        ) as error:  # deadlines are kept meanwhile, and nothing is lost: what wasn't put aside isn't committed
            log.warning("what can't be read isn't put aside at present", error=repr(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RETRY_S)


async def _read(
    settings: LifecycleSettings, producer: EventProducer, decoder: EventDecoder, stop: asyncio.Event
) -> None:
    batching = Batching(FETCH_WAIT_MS, FETCH_BYTES_MIN)
    timeout_ms = settings.session_timeout_ms
    consumer = make_consumer(
        settings.kafka,
        group=GROUP,
        session_timeout_ms=timeout_ms,
        heartbeat_interval_ms=timeout_ms // 5,
        max_partition_fetch_bytes=PARTITION_BYTES_MAX,
        **batching.arguments,
    )
    clerk = Clerk(consumer, producer, decoder)
    consumer.subscribe(list(TOPICS), listener=clerk)
    committed_s = time.monotonic()
    try:
        await consumer.start()
        while not stop.is_set():
            batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=RECORDS_MAX)
            batching.heard(consumer, bool(batches))
            for place, records in batches.items():
                await clerk.take(place, records)
            clerk.pass_over()
            if time.monotonic() - committed_s >= settings.commit_interval_ms / 1000:
                committed_s = time.monotonic()
                await clerk.commit()
        await clerk.commit()
    finally:
        await stop_consumer(consumer)
