"""The clock acts: follows `lifecycle`, ends in `tokens` what `decisions.deadlines` says is due, and tells workers whose work nobody hears of.

One aiokafka consumer in the group `deadlines`. A partition's offset is committed only below its oldest open request, so the next owner
finds all of them. Nothing is said before a partition has been read to where it ended when it came: what ended meanwhile needs no word.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from decisions.deadlines import Watch, Word
from infra import metrics
from infra.kafka import Batching, make_consumer
from infra.log import EventDecoder, EventProducer, NoSuchPartition
from infra.positions import handed_out, since
from infra.reach import until_reached
from infra.settings import LifecycleSettings
from infra.telemetry import OpsServer
from schemas.events import InferenceCancelled
from schemas.topics import CONTROL, HOUR_MS, LIFECYCLE, SCHEMAS, TOKENS
from streams import dead_letters
from streams.outbox import Outgoing, cut_short, deliver
from streams.payloads import sweep_regularly
from streams.writes import Writes

PROCESS = "lifecycle"
GROUP = "deadlines"
TOPICS = (LIFECYCLE, TOKENS, CONTROL, SCHEMAS)
POLL_MS = 500
RECORDS_MAX = 2_000
WORDS_MAX = 512
"""Words on their way at once; the others wait."""
READ_BACK_MS = 2 * HOUR_MS
"""How far a group without offsets reads back: whatever is older has left `tokens`."""
FETCH_WAIT_MS = 100
"""By so much a deadline may be heard of late; a fetch for each record would cost more than all else that is done for it."""
FETCH_BYTES_MIN = 64 * 1024
LEAVE_WAIT_S = 5.0

log = structlog.get_logger("streams.deadlines")


@dataclass(slots=True)
class _Held:
    watch: Watch
    caught_up_at: int
    committed: int
    caught_up: bool = False


class Deadlines(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """Watches the partitions that the group gives it."""

    def __init__(self, consumer: AIOKafkaConsumer, producer: EventProducer, decoder: EventDecoder) -> None:
        self._consumer = consumer
        self._producer = producer
        self._decoder = decoder
        self._held: dict[TopicPartition, _Held] = {}
        self.words = Writes()
        self.assigned = False

    # --- partitions come and go --------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Commit what is needed no more, and forget."""
        try:
            await self.commit()
        finally:
            for partition in list(revoked):
                self._held.pop(partition, None)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Begin each partition at its oldest open request."""
        try:
            await self._open(list(assigned))
        except Exception as error:  # aiokafka would log it, and go on with partitions that nobody watches
            self.words.fail(error)

    async def _open(self, partitions: list[TopicPartition]) -> None:
        recent = await since(self._consumer, partitions, _now_ms() - READ_BACK_MS)
        for partition in partitions:
            start = await self._consumer.committed(partition)
            if partition not in self._consumer.assignment():  # others are on their way
                log.info("partitions are gone before they were begun")
                self._held.clear()
                return
            end = recent[partition].end
            if start is None:
                start = recent[partition].start
            self._held[partition] = _Held(Watch(start), end, start, caught_up=start >= end)
            self._consumer.seek(partition, start)
        self.assigned = True

    # --- records and words -------------------------------------------------------------------------------------------

    @property
    def wait_ms(self) -> int:
        """How long may be waited for records before something may be due."""
        dues = [held.watch.next_due_ms for held in self._held.values() if held.caught_up]
        first_ms = min((due for due in dues if due is not None), default=None)
        return POLL_MS if first_ms is None else max(1, min(POLL_MS, first_ms - _now_ms()))

    async def take(self, partition: TopicPartition, records: Iterable[ConsumerRecord]) -> None:
        """What `lifecycle` tells of requests. A record that can't be read is passed over: it is no event of ours."""
        held = self._held.get(partition)
        for record in records:
            event = await self._decoder.decode_or_pass_over(record)
            if held is None or self._held.get(partition) is not held:
                return
            held.watch.apply(record.offset, record.timestamp, event)
            held.caught_up = held.caught_up or record.offset + 1 >= held.caught_up_at

    def pass_over(self) -> None:
        """To be told after `take`: what wasn't handed out by now, since no client can read it, is passed."""
        for partition, position in handed_out(self._consumer).items():
            if (held := self._held.get(partition)) is not None:
                held.watch.pass_over(position)
                held.caught_up = held.caught_up or position >= held.caught_up_at

    def speak(self) -> None:
        """Say what is due, as far as there is room."""
        now_ms = _now_ms()
        for held in self._held.values():
            if held.caught_up:
                for word in held.watch.due(now_ms, WORDS_MAX - len(self.words)):
                    self.words.begin(self._say(word))
                for stop in held.watch.stops(now_ms, WORDS_MAX - len(self.words)):
                    self.words.begin(self._stop(stop))

    async def _say(self, word: Word) -> None:
        ending = word.ending
        try:
            await deliver(self._producer, cut_short(word.reply, ending, word.cancel))
        except NoSuchPartition as error:
            log.warning("a caller's partition is gone", request_id=ending.request_id, error=error.message)
        else:
            metrics.ENDED_BY_CLOCK.labels(ending.reason).inc()

    async def _stop(self, cancel: InferenceCancelled) -> None:
        log.info("work that nobody hears of is stopped", request_id=cancel.request_id, tenant=cancel.tenant)
        await deliver(self._producer, [Outgoing(CONTROL, cancel, cancel.request_id)])

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit below the oldest open requests. If the group has moved on, the next owner reads a little more."""
        due = {
            partition: held.watch.committable
            for partition, held in self._held.items()
            if held.watch.committable > held.committed
        }
        if not due:
            return
        try:
            await self._consumer.commit(due)
        except (CommitFailedError, IllegalStateError) as error:
            log.info("a commit came too late", error=type(error).__name__)
            return
        for partition, offset in due.items():
            if partition in self._held:
                self._held[partition].committed = offset


async def run(settings: LifecycleSettings, stop: asyncio.Event) -> None:
    """Keep deadlines until `stop` is set. Raises what makes it impossible to go on."""
    producer, decoder = EventProducer(settings.kafka, PROCESS), EventDecoder(settings.kafka)
    batching = Batching(FETCH_WAIT_MS, FETCH_BYTES_MIN)
    consumer = make_consumer(
        settings.kafka,
        group=GROUP,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=settings.session_timeout_ms // 5,
        **batching.arguments,
    )
    deadlines = Deadlines(consumer, producer, decoder)
    waiting = "connecting"

    def wait(missing: str) -> None:
        nonlocal waiting
        waiting = missing

    ops = OpsServer(settings.ops_port, lambda: producer.failure if deadlines.assigned else waiting)
    async with contextlib.AsyncExitStack() as cleanup:
        await ops.start()
        cleanup.push_async_callback(ops.stop)
        if not await until_reached(settings.kafka, TOPICS, stop, wait):
            return
        wait(f"no partitions of {LIFECYCLE} are assigned yet")
        await producer.start()
        cleanup.push_async_callback(producer.stop)
        consumer.subscribe([LIFECYCLE], listener=deadlines)
        cleanup.push_async_callback(consumer.stop)
        await consumer.start()
        following: asyncio.Future[Any] = asyncio.ensure_future(_follow(settings, consumer, batching, deadlines, stop))
        cleanup.push_async_callback(_cancel, following)
        sweeping = asyncio.ensure_future(sweep_regularly(settings))
        cleanup.push_async_callback(_cancel, sweeping)
        putting_aside = asyncio.ensure_future(dead_letters.follow(settings, producer, stop))
        cleanup.push_async_callback(_leave, putting_aside, stop)
        log.info("deadlines are kept")
        done, _ = await asyncio.wait([following, deadlines.words.failed], return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
        await deadlines.words.settled(LEAVE_WAIT_S)
        with contextlib.suppress(KafkaError):
            await deadlines.commit()


async def _follow(
    settings: LifecycleSettings,
    consumer: AIOKafkaConsumer,
    batching: Batching,
    deadlines: Deadlines,
    stop: asyncio.Event,
) -> None:
    committed_s = time.monotonic()
    while not stop.is_set():
        batches = await consumer.getmany(timeout_ms=deadlines.wait_ms, max_records=RECORDS_MAX)
        batching.heard(consumer, bool(batches))
        for partition, records in batches.items():
            await deadlines.take(partition, records)
        deadlines.pass_over()
        deadlines.speak()
        if time.monotonic() - committed_s >= settings.commit_interval_ms / 1000:
            committed_s = time.monotonic()
            try:
                await deadlines.commit()
            except KafkaError as error:
                log.warning("can't commit yet", error=type(error).__name__)


async def _leave(task: asyncio.Future[Any], stop: asyncio.Event) -> None:
    """Let it end by itself where it was told to."""
    if stop.is_set():
        await asyncio.wait([task], timeout=LEAVE_WAIT_S)
    await _cancel(task)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _now_ms() -> int:
    return int(time.time() * 1000)
