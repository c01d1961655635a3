"""A topic as state in memory: read to its end at the start, then followed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError

from infra import metrics
from infra.kafka import fetch_within, make_consumer, stop_consumer, unreachable
from infra.log import EventDecoder
from infra.read import READ_STALL_S, Positions, assign_all, reached
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError, Undecodable
from schemas.events import Event
from schemas.reasons import Reason

POLL_MS = 500
FOLLOW_WAIT_MS = 5_000
"""The broker answers at the first record; where none comes, many views would else ask many times a second."""
RECORDS_PER_POLL_MAX = 1_000
LOOK_S_MAX = 2.0
POSITION_LOOK_S = 0.005
RETRY_S = 1.0  # without end: `failure` says meanwhile that what is known may be old

Apply = Callable[[Event, ConsumerRecord], None]


class View:
    """Applies every record of a topic, from the first one there is, in order within a partition.

    A record that can't be decoded, or that `apply` raises on, is logged, counted in `bad_records` and passed over.
    `on_tombstone` gets the key of a record without value. Both run in the event loop and must not block.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        topic: str,
        apply: Apply,
        on_tombstone: Callable[[str], None] | None = None,
    ) -> None:
        self.topic = topic
        self.bad_records = 0
        self.failure: str | None = None
        self._settings = settings
        self._apply = apply
        self._on_tombstone = on_tombstone
        self._decoder = EventDecoder(settings)
        self._consumer: AIOKafkaConsumer | None = None
        self._positions: Positions = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._applying = False
        self._asker: AIOKafkaConsumer | None = None
        self._look: asyncio.Task[bool] | None = None
        self._next_look: asyncio.Task[bool] | None = None
        self._log = structlog.get_logger("view").bind(topic=topic)

    async def start(self) -> None:
        """Return once everything that was there at the call is applied, and follow from then on.

        Raises HeadraceError (unavailable) if the topic doesn't exist or can't be read.
        """
        try:
            ends = await self._open()
            await self._catch_up(ends)
        except KafkaConnectionError as error:
            await self._close()
            raise HeadraceError(Reason.UNAVAILABLE, await unreachable(self._settings, error)) from error
        except (KafkaError, OSError) as error:
            await self._close()
            raise HeadraceError(Reason.UNAVAILABLE, f"the topic {self.topic} can't be read: {error}") from error
        except BaseException:
            await self._close()
            raise
        self._task = asyncio.create_task(self._follow(), name=f"view of {self.topic}")

    async def stop(self) -> None:
        """Stop following; the state stays."""
        tasks = [task for task in (self._task, self._look, self._next_look) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._task = self._look = self._next_look = None
        await self._close()
        asker, self._asker = self._asker, None
        if asker is not None:
            await stop_consumer(asker)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds after some record; False if it doesn't within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    changed = self._changed
                    await changed.wait()
        return condition()

    async def change(self) -> None:
        """Wait until some record has been applied, or passed over, from now on."""
        await self._changed.wait()

    async def caught_up(self) -> bool:
        """Wait until all that stood in the topic at the call is applied; False if the topic can't be read now, or that takes longer than `LOOK_S_MAX`.

        However many ask at once, the broker is asked once for all of them.
        """
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._look_after(self._look), name=f"look into {self.topic}")
        look = self._next_look
        await asyncio.wait([look])  # for all who ask: who leaves doesn't end it
        return not look.cancelled() and look.result()

    async def _look_after(self, before: asyncio.Task[bool] | None) -> bool:
        """One look to the present end. A look that has begun is no answer to who asks after it, so the next begins when it is over."""
        if before is not None:
            await asyncio.wait([before])
        self._look, self._next_look = self._next_look, None
        with contextlib.suppress(KafkaError, OSError, TimeoutError):
            async with asyncio.timeout(LOOK_S_MAX):
                consumer = self._consumer
                if consumer is None:
                    return False
                ends = await self._ends(list(consumer.assignment()))
                while consumer is self._consumer:
                    if await reached(consumer, ends) and not self._applying:
                        return True
                    await asyncio.sleep(POSITION_LOOK_S)
        return False

    async def _ends(self, partitions: list[TopicPartition]) -> Positions:
        """Where the partitions end. Asked by a client of its own: a broker answers a connection in turn, and the follower's waits for records."""
        asker = self._asker
        if asker is None:
            asker = make_consumer(self._settings)
            try:
                await asker.start()
            except BaseException:
                await stop_consumer(asker)
                raise
            self._asker = asker
        ends: Positions = await asker.end_offsets(partitions)
        return ends

    async def _open(self) -> Positions:
        self._consumer = make_consumer(self._settings, fetch_max_wait_ms=POLL_MS)
        await self._consumer.start()
        return await assign_all(self._consumer, self.topic, self._positions)

    async def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer)

    async def _catch_up(self, ends: Positions) -> None:
        assert self._consumer is not None
        loop = asyncio.get_running_loop()
        limit = loop.time() + READ_STALL_S
        while not await reached(self._consumer, ends):
            if await self._poll():
                limit = loop.time() + READ_STALL_S
            elif loop.time() > limit:
                raise HeadraceError(Reason.UNAVAILABLE, f"the topic {self.topic} can't be read to its end")

    async def _poll(self) -> bool:
        assert self._consumer is not None
        batches = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=RECORDS_PER_POLL_MAX)
        self._applying = True  # the consumer's position is past them already
        try:
            for partition, records in batches.items():
                for record in records:
                    await self._take(record)
                    self._positions[partition] = record.offset + 1
        finally:
            self._applying = False
        if batches:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        return bool(batches)

    async def _take(self, record: ConsumerRecord) -> None:
        """Apply one record. Raises HeadraceError only when its schema can't be looked up at present."""
        try:
            event = None if record.value is None else await self._decoder.decode(record.value)
            if event is not None:
                self._guarded(record, lambda: self._apply(event, record))
            elif self._on_tombstone is not None and record.key is not None:
                on_tombstone, key = self._on_tombstone, record.key
                self._guarded(record, lambda: on_tombstone(key.decode()))
        except Undecodable as error:
            self._pass_over(record, error)

    def _guarded(self, record: ConsumerRecord, apply: Callable[[], None]) -> None:
        try:
            apply()
        except Exception as error:  # whatever a record holds, those after it count
            self._pass_over(record, error)

    def _pass_over(self, record: ConsumerRecord, error: Exception) -> None:
        self.bad_records += 1
        metrics.PASSED_OVER.labels(self.topic).inc()
        self._log.warning("record passed over", partition=record.partition, offset=record.offset, error=repr(error))

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                if self._consumer is None:
                    await self._open()
                assert self._consumer is not None
                fetch_within(self._consumer, FOLLOW_WAIT_MS)
                await self._poll()
                failures, self.failure = 0, None
            except Exception as error:  # the follower outlives what the broker and the network do
                failures += 1
                self.failure = f"the topic {self.topic} can't be followed: {error!r}"
                self._log.warning("can't be followed", error=repr(error), failures=failures)
                await self._close()
                await asyncio.sleep(RETRY_S)
