"""Fence, then read: what a new owner does with records that a former one may have started.

It reads each of their `tokens` partitions from the oldest such record's time, writes a marker for each record, waits until the broker has
confirmed them all, and reads on up to its own markers. `decisions/takeover.py` then says what to do with each. A worker that hands its
records over waits here for those markers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from decisions.stream import Input
from decisions.takeover import Action, Reading, decide
from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer, NoSuchPartition
from infra.settings import WorkerSettings
from schemas.errors import HeadraceError, Undecodable
from schemas.events import GenerationTakenOver
from schemas.reasons import Reason
from workers.work import Work, tell

log = structlog.get_logger("worker")

CLOCK_SKEW_MS = 2_000
"""By how much the clocks of two brokers may differ: reading begins this much before the oldest record's time."""
READ_WAIT_MS = 500
READ_RECORDS_MAX = 1_000
SILENCE_MAX_S = 20.0
"""A partition that gives nothing for so long before the marker may have been deleted: the batch is begun anew, and others get their turn."""


class TakeOver:
    """Fences and reads, one batch at a time. `start` and `stop` it."""

    def __init__(self, settings: WorkerSettings, producer: EventProducer, decoder: EventDecoder) -> None:
        """The reader is a consumer of its own, in no group."""
        self._settings = settings
        self._producer = producer
        self._decoder = decoder
        self._lock = asyncio.Lock()
        self._reader: AIOKafkaConsumer = make_consumer(settings.kafka, client_id=f"{settings.worker_id}-takeover")

    async def start(self) -> None:
        """Connects."""
        await self._reader.start()

    async def stop(self) -> None:
        """Disconnects."""
        await self._reader.stop()

    async def take_over(self, works: Sequence[Work]) -> list[tuple[Work, HeadraceError]]:
        """Sets the plan of each record; each bears the attempt that its marker shall have. Returns those whose stream can't be written."""
        async with self._lock:
            works, unwritable = await self._part(works)
            if not works:
                return unwritable
            try:
                streams = _Streams(self._reader, self._decoder, works)
                # Most of it is read before the markers: a former owner that still goes on is cut off by them, and its caller waits.
                await streams.read(await streams.find())
                await streams.read(await self._fence(works))
            except KafkaError as error:
                raise HeadraceError(Reason.UNAVAILABLE, f"the streams to take over can't be read: {error}") from error
        for work in works:
            assert work.attempt is not None
            work.plan = decide(
                streams.reading(work), work.attempt, work.scheduled.sampling, self._settings.poison_attempts_max
            )
            # In the first window after a start nobody had begun most of them: that is no news.
            say = log.debug if work.plan.action is Action.RUN and not any(work.plan.totals) else log.info
            say(
                "took over", request_id=work.scheduled.request_id, action=work.plan.action.name.lower(), accepted=sum(work.plan.totals), detail=work.plan.detail,
            )  # fmt: skip
        return unwritable

    async def hand_over(self, works: Sequence[Work], leave: Callable[[], Awaitable[None]]) -> AsyncGenerator[Work]:
        """Calls `leave`, then gives each running record as soon as another worker's marker is in its stream. Raises KafkaError."""
        async with self._lock:
            open_works = {(place_of(work), work.scheduled.request_id): work for work in works}
            places = list({place for place, _ in open_works})
            self._reader.assign(places)
            for place, end in (await self._reader.end_offsets(places)).items():
                self._reader.seek(place, end)
            await leave()
            while open_works:
                for place, records in (await self._reader.getmany(timeout_ms=READ_WAIT_MS)).items():
                    for record in records:
                        event = await _decode(self._decoder, place, record, open_works)
                        if not isinstance(event, GenerationTakenOver):
                            continue
                        work = open_works[place, event.request_id]
                        if work.job is None or event.attempt > work.job.attempt:
                            del open_works[place, event.request_id]
                            yield work

    async def _part(self, works: Sequence[Work]) -> tuple[list[Work], list[tuple[Work, HeadraceError]]]:
        """Those whose stream can be written, and the others with the reason."""
        writable: list[Work] = []
        unwritable: list[tuple[Work, HeadraceError]] = []
        for work in works:
            reply = work.scheduled.reply
            try:
                await self._producer.require(reply.topic, reply.partition)
            except NoSuchPartition as error:
                unwritable.append((work, error))
            else:
                writable.append(work)
        return writable, unwritable

    async def _fence(self, works: Sequence[Work]) -> dict[TopicPartition, int]:
        """Writes the markers; returns, for each partition they went to, the offset of the last."""
        sends = []
        for work in works:
            assert work.attempt is not None
            asked = work.scheduled
            marker = GenerationTakenOver(
                asked.request_id,
                asked.tenant,
                asked.model,
                asked.version,
                asked.tier,
                work.attempt,
                self._settings.worker_id,
            )
            sends.append(await tell(self._producer, work, marker))
        last: dict[TopicPartition, int] = {}
        for confirmed in await asyncio.gather(*sends):
            place = TopicPartition(confirmed.topic, confirmed.partition)
            last[place] = max(last.get(place, -1), confirmed.offset)
        return last


class _Streams:
    """The streams of some records, read in steps, each partition once."""

    def __init__(self, reader: AIOKafkaConsumer, decoder: EventDecoder, works: Sequence[Work]) -> None:
        self._reader = reader
        self._decoder = decoder
        self._since: dict[TopicPartition, int] = {}
        self._readings = {(place_of(work), work.scheduled.request_id): Reading() for work in works}
        for work in works:
            # Not the record's own time: admission may have written it again, after the stream of the first one had begun.
            asked_ms = min(work.timestamp_ms, work.scheduled.requested_ms)
            place = place_of(work)
            self._since[place] = min(self._since.get(place, asked_ms), asked_ms)

    def reading(self, work: Work) -> Reading:
        """What its stream says, as far as it has been read."""
        return self._readings[place_of(work), work.scheduled.request_id]

    async def find(self) -> dict[TopicPartition, int]:
        """Stands where the streams begin; returns the last offset of each partition that has anything to read."""
        self._reader.assign(list(self._since))
        # The ends first: what a former owner writes between the two questions then lies after them, where it is read.
        ends = await self._reader.end_offsets(list(self._since))
        starts = await self._reader.offsets_for_times(
            {place: max(0, time_ms - CLOCK_SKEW_MS) for place, time_ms in self._since.items()}
        )
        last = {}
        for place, end in ends.items():
            found = starts.get(place)
            start = end if found is None else min(found.offset, end)
            self._reader.seek(place, start)
            if start < end:
                last[place] = end - 1
        return last

    async def read(self, last: dict[TopicPartition, int]) -> None:
        """Folds the streams up to these offsets. Raises HeadraceError (unavailable) if a partition falls silent before."""
        left = dict(last)
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while left:
            batches = await self._reader.getmany(*left, timeout_ms=READ_WAIT_MS, max_records=READ_RECORDS_MAX)
            if batches:
                heard_s = loop.time()
            elif loop.time() > heard_s + SILENCE_MAX_S:
                raise HeadraceError(Reason.UNAVAILABLE, f"{next(iter(left))} can't be read up to the marker")
            for place, records in batches.items():
                for record in records:
                    if record.offset > last[place]:
                        self._reader.seek(place, record.offset)  # the next step's
                        break
                    event = await _decode(self._decoder, place, record, self._readings)
                    if event is not None:
                        self._readings[place, event.request_id].apply(event)
                if await self._reader.position(place) > last[place]:
                    del left[place]


def place_of(work: Work) -> TopicPartition:
    """Where its answer goes."""
    return TopicPartition(work.scheduled.reply.topic, work.scheduled.reply.partition)


async def _decode(
    decoder: EventDecoder, place: TopicPartition, record: Any, wanted: Container[tuple[TopicPartition, str]]
) -> Input | None:
    """The event of a stream that is wanted, or None."""
    key = (record.key or b"").decode(errors="replace")
    if key and (place, key) not in wanted:
        return None
    try:
        event = await decoder.decode(record.value)
    except Undecodable:
        return None
    return event if isinstance(event, Input) and (place, event.request_id) in wanted else None
