"""Endings acts: the one reader that folds `tokens` and alone writes `InferenceStarted`, endings and answers.

One aiokafka consumer in the group `endings` over all `tokens` topics. A partition's offset is committed only below its
oldest open request, and only when all that was written because of it is confirmed; after a crash that much is folded
again and written again, which changes nothing for readers. A partition that comes anew is also read back a little
without a word, so that a zombie's late record finds its request closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from decisions.cache import ENTRY_BYTES_MAX
from decisions.stream import Input
from infra import metrics
from infra.dead_letters import dead_letter
from infra.kafka import Batching, make_consumer
from infra.log import EventDecoder, EventProducer, Headers, RecordTooLarge
from infra.objects import StoreAway
from infra.payloads import Payloads
from infra.positions import handed_out, since
from infra.reach import until_reached
from infra.settings import EndingsSettings
from infra.telemetry import OpsServer
from infra.tracing import child
from schemas.errors import Undecodable
from schemas.events import Event, InferenceAnswered, InferenceCompleted, InferenceFailed, InferenceJoined
from schemas.payloads import is_reference, without_content
from schemas.reasons import Reason
from schemas.topics import ANSWERS, CACHE_HEADER, DEAD_LETTERS, LIFECYCLE, SCHEMAS, TOKENS, TOKENS_PATTERN
from streams.fold_table import FoldTable, Output
from streams.outbox import Outgoing, deliver
from streams.writes import Writes

PROCESS = GROUP = "endings"
TOPICS = (TOKENS, SCHEMAS, LIFECYCLE, ANSWERS, DEAD_LETTERS)
READ_BACK_MS = 120_000
"""How far a new partition is read back in silence: longer than a worker that lost its partitions can still write."""
POLL_MS = 200
REVOKE_WAIT_S = 5.0
METADATA_AGE_MS = 2_000
"""How soon a new tenant's topic is found."""
FETCH_WAIT_MS = 200
"""Callers read `tokens` themselves and nobody waits for an ending here, so chunks are fetched many at once, this late at most;"""
FETCH_BYTES_MIN = 256 * 1024
"""or as soon as there are so many bytes. A fetch for each chunk costs as much as all else that is done for it."""
AT_ONCE_BYTES_MAX = 64 * 1024
"""An answer of no more content is surely small enough for a record, whatever its characters take."""
TOLD_MAX = 64
"""So many records' outputs are written at once, where they come one on the other: a task for each costs as much as the rest of its writing."""
CONTENT_BYTES_TOTAL_MAX = 512 * 1024 * 1024
"""Answers held in memory over all partitions; beyond it the oldest are let go and end as too large."""

Told = tuple[Sequence[Output], ConsumerRecord]
"""What a record caused, and the record."""

log = structlog.get_logger("streams.endings")


class Endings(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Folds the partitions that the group gives it."""

    def __init__(
        self, settings: EndingsSettings, consumer: AIOKafkaConsumer, producer: EventProducer, decoder: EventDecoder
    ) -> None:
        self._settings = settings
        self._consumer = consumer
        self._producer = producer
        self._decoder = decoder
        self._tables: dict[TopicPartition, FoldTable] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._told: list[Told] = []
        self.writes = Writes()
        self.assigned = False

    # --- partitions come and go --------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Commit what can be, and forget."""
        try:
            await self.commit(REVOKE_WAIT_S)
        finally:
            for partition in list(revoked):
                self._tables.pop(partition, None)
                self._committed.pop(partition, None)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Start each partition a little before its committed offset."""
        try:
            await self._open(list(assigned))
        except Exception as error:  # aiokafka would log it, and go on with partitions that nobody folds
            self.writes.fail(error)

    async def _open(self, partitions: list[TopicPartition]) -> None:
        recent = await since(self._consumer, partitions, int(time.time() * 1000) - READ_BACK_MS)
        firsts = await self._consumer.beginning_offsets(partitions) if partitions else {}
        for partition in partitions:
            committed = await self._consumer.committed(partition)
            if partition not in self._consumer.assignment():  # a new tenant's topic takes all away for a moment
                log.info("partitions are gone before they were begun")
                self._tables.clear()
                self._committed.clear()
                return
            aloud_from = committed if committed is not None else firsts[partition]
            start = min(aloud_from, recent[partition].start)
            self._tables[partition] = FoldTable(
                partition.topic, partition.partition, aloud_from, self._settings.remember_ms
            )
            self._committed[partition] = aloud_from
            self._consumer.seek(partition, max(start, firsts[partition]))
        self.assigned = True

    # --- records -----------------------------------------------------------------------------------------------------

    async def take(self, batches: Mapping[TopicPartition, Iterable[ConsumerRecord]]) -> None:
        """Fold what was read, unless its partition is taken away meanwhile."""
        tables = {partition: self._tables.get(partition) for partition in batches}
        for partition, records in batches.items():
            for record in records:
                # What is behind a reference is fetched, and others don't wait for it.
                if len(self._told) >= TOLD_MAX or is_reference(record.value):
                    self._begin_told()
                await self.writes.room()
                event, fault = await self._decode(record)
                table = tables[partition]
                if table is None or self._tables.get(partition) is not table:
                    break
                metrics.of(metrics.RECORDS, metrics.topic_label(record.topic)).inc()
                self._fold(table, record, event, fault)
        self._begin_told()
        self._bound()

    def pass_over(self) -> None:
        """To be told after `take`: what wasn't handed out by now, since no client can read it, is done."""
        for partition, position in handed_out(self._consumer).items():
            if (table := self._tables.get(partition)) is not None:
                table.skip(position - 1)

    def _fold(self, table: FoldTable, record: ConsumerRecord, event: Event | None, fault: Undecodable | None) -> None:
        """Without a pause: once a record counts as passed, the writes that it causes are begun, or known as told."""
        if fault is not None:
            self._bury(table, record, fault.reason, fault.message)
        elif isinstance(event, Input):
            if outputs := table.apply(record.offset, record.timestamp, event):
                self._tell(outputs, record)
        elif isinstance(event, InferenceJoined):  # for its caller; the stream that answers it has its own ending
            table.skip(record.offset)
        else:
            text = f"{type(event).__name__} doesn't belong on {record.topic}"
            self._bury(table, record, Reason.INVALID_REQUEST, text, event)

    async def _decode(self, record: ConsumerRecord) -> tuple[Event | None, Undecodable | None]:
        try:
            return await self._decoder.decode(record.value), None
        except Undecodable as fault:
            return None, fault

    def _tell(self, outputs: Sequence[Output], record: ConsumerRecord) -> None:
        """Whatever is large is written by itself: the others' endings don't wait until it is in the object store."""
        if any(
            isinstance(output, InferenceAnswered) and _content_bytes(output) > AT_ONCE_BYTES_MAX for output in outputs
        ):
            self._begin_told()  # a start is written before its ending
            for output in outputs:
                self.writes.begin(self._write((output,), record))
        else:
            self._told.append((outputs, record))

    def _begin_told(self) -> None:
        """Begin to write what was told."""
        if self._told:
            told, self._told = self._told, []
            self.writes.begin(self._write_told(told), len(told))

    async def _write_told(self, told: Sequence[Told]) -> None:
        """What several records caused, all at once. If the log doesn't take one of them, each is written by itself."""
        outgoing = []
        for outputs, record in told:
            trace = child(record.headers)
            outgoing += [_outgoing(output, trace) for output in outputs]
        try:
            await deliver(self._producer, outgoing)
        except (RecordTooLarge, StoreAway):
            for outputs, record in told:
                await self._write(outputs, record)
            return
        for outputs, _ in told:
            for output in outputs:
                _count(output)

    async def _write(self, outputs: Sequence[Output], record: ConsumerRecord) -> None:
        """What one record caused; ids derive from the request, so that a repetition is recognised."""
        trace = child(record.headers)
        try:
            await deliver(self._producer, [_outgoing(output, trace) for output in outputs])
        except (RecordTooLarge, StoreAway) as error:
            log.error("an answer is kept without its content", request_id=outputs[0].request_id, error=error.message)
            reason = Reason.ANSWER_TOO_LARGE if isinstance(error, RecordTooLarge) else Reason.PAYLOAD_LOST
            await deliver(self._producer, [_outgoing(output, trace, reason) for output in outputs])
        for output in outputs:
            _count(output)

    def _bury(
        self, table: FoldTable, record: ConsumerRecord, reason: Reason, message: str, event: Event | None = None
    ) -> None:
        if table.skip(record.offset):
            log.warning("dead-lettered", topic=record.topic, partition=record.partition, offset=record.offset)
            self.writes.begin(dead_letter(self._producer, record, reason.value, message, PROCESS, event))

    def _bound(self) -> None:
        """Let go of what is too old, and where all is too much, of the oldest in the partition that has the most."""
        now_ms = int(time.time() * 1000)
        tables = self._tables.values()
        too_old = sum(table.drop_older_than(now_ms - self._settings.hard_limit_ms) for table in tables)
        too_many = 0
        while (excess := sum(len(table.open) for table in tables) - self._settings.open_requests_max) > 0:
            fullest = max(tables, key=lambda table: len(table.open))
            too_many += fullest.drop_beyond(max(0, len(fullest.open) - excess), now_ms)
        if too_old or too_many:
            metrics.OPEN_REQUESTS_DROPPED.labels("age").inc(too_old)
            metrics.OPEN_REQUESTS_DROPPED.labels("number").inc(too_many)
            log.error("open requests are dropped without an ending", too_old=too_old, too_many=too_many)
        let_go = 0
        while (excess := sum(table.content_bytes for table in tables) - CONTENT_BYTES_TOTAL_MAX) > 0:
            fullest = max(tables, key=lambda table: table.content_bytes)
            let_go += fullest.drop_contents(fullest.content_bytes - excess)
        if let_go:
            log.error("answers are let go for want of memory", requests=let_go)

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def commit(self, timeout_s: float | None = None) -> None:
        """Commit what is needed no more, once what was written because of it is confirmed."""
        self._begin_told()  # `take` may pause between a record and its write
        ready = {partition: table.committable for partition, table in self._tables.items()}
        due = {partition: offset for partition, offset in ready.items() if offset > self._committed.get(partition, -1)}
        if not due or not await self.writes.settled(timeout_s):
            return
        due = {partition: offset for partition, offset in due.items() if partition in self._tables}
        try:
            await self._consumer.commit(due)
        except (CommitFailedError, IllegalStateError) as error:
            names = [f"{partition.topic}:{partition.partition}" for partition in sorted(due)]
            log.warning("not committed: the group has moved on", partitions=names, error=type(error).__name__)
            return  # the next owner repeats what it finds uncommitted
        self._committed.update(due)

    async def commit_regularly(self) -> None:
        """Commit and drop what is too old, for as long as the process runs."""
        while True:
            await asyncio.sleep(self._settings.commit_interval_ms / 1000)
            self._bound()
            try:
                await self.commit()
            except KafkaError as error:
                log.warning("can't commit yet", error=type(error).__name__)


def _outgoing(output: Output, trace: Headers, without: Reason | None = None) -> Outgoing:
    """`without` says why an answer is kept without its content, if it is."""
    if not isinstance(output, InferenceAnswered):
        return Outgoing(LIFECYCLE, output, output.tenant, headers=trace)
    if without is not None:
        return Outgoing(ANSWERS, without_content(output, without.text, without), output.request_id, headers=trace)
    if output.cache_key and _content_bytes(output) <= ENTRY_BYTES_MAX:
        trace = (*trace, (CACHE_HEADER, output.cache_key.encode()))
    return Outgoing(ANSWERS, output, output.request_id, headers=trace)


def _content_bytes(answer: InferenceAnswered) -> int:
    """At least what an answer's content takes."""
    return sum(len(choice.text) for choice in answer.choices) + sum(len(tensor.data) for tensor in answer.outputs)


def _count(output: Event) -> None:
    match output:
        case InferenceCompleted():
            metrics.of(metrics.REQUESTS, output.model, output.version, output.tier, "completed").inc()
        case InferenceFailed():
            metrics.of(metrics.REQUESTS, output.model, output.version, output.tier, output.reason).inc()


async def run(settings: EndingsSettings, stop: asyncio.Event) -> None:
    """Run endings until `stop` is set. Raises what makes it impossible to go on."""
    payloads = Payloads.of(settings)
    producer = EventProducer(settings.kafka, PROCESS, payloads, gather=True)
    decoder = EventDecoder(settings.kafka, payloads)
    batching = Batching(FETCH_WAIT_MS, FETCH_BYTES_MIN)
    consumer = make_consumer(
        settings.kafka,
        group=GROUP,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=settings.session_timeout_ms // 5,
        metadata_max_age_ms=METADATA_AGE_MS,
        **batching.arguments,
    )
    endings = Endings(settings, consumer, producer, decoder)
    waiting = "connecting"

    def wait(missing: str) -> None:
        nonlocal waiting
        waiting = missing

    ops = OpsServer(settings.ops_port, lambda: producer.failure if endings.assigned else waiting)
    async with contextlib.AsyncExitStack() as cleanup:
        await ops.start()
        cleanup.push_async_callback(ops.stop)
        cleanup.push_async_callback(payloads.close)
        if not await until_reached(settings.kafka, TOPICS, stop, wait):
            return
        wait("no partitions of tokens are assigned yet")
        await producer.start()
        cleanup.push_async_callback(producer.stop)
        consumer.subscribe(pattern=TOKENS_PATTERN, listener=endings)
        cleanup.push_async_callback(consumer.stop)
        await consumer.start()
        reading: asyncio.Future[Any] = asyncio.ensure_future(_read(settings, consumer, batching, endings, stop))
        committing: asyncio.Future[Any] = asyncio.ensure_future(endings.commit_regularly())
        cleanup.push_async_callback(_cancel, (reading, committing))
        log.info("endings runs")
        watched = [reading, committing, endings.writes.failed]
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
        await _cancel((committing,))
        await endings.commit(REVOKE_WAIT_S)


async def _read(
    settings: EndingsSettings, consumer: AIOKafkaConsumer, batching: Batching, endings: Endings, stop: asyncio.Event
) -> None:
    """Ends by itself, between records, so that whatever was folded has its writes begun."""
    while not stop.is_set():
        batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=settings.poll_records_max)
        batching.heard(consumer, bool(batches))
        await endings.take(batches)
        endings.pass_over()


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
