"""Fence, then read: what a new owner does with records that a former one may have started.

It writes a marker for each to its `tokens` partition, waits until the broker has confirmed them all, and reads each of these partitions
once, from the oldest such record's time up to its own markers. `decisions/takeover.py` then says what to do with each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from decisions.stream import Input
from decisions.takeover import Action, Reading, decide
from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer
from infra.settings import WorkerSettings
from schemas.errors import HeadraceError, Undecodable
from schemas.events import GenerationTakenOver
from schemas.reasons import Reason
from workers.work import RequestKey, Work, tell

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
            markers, unwritable = await self._fence(works)
            refused = {id(work) for work, _ in unwritable}
            works = [work for work in works if id(work) not in refused]
            try:
                readings = await self._read(works, markers)
            except KafkaError as error:
                raise HeadraceError(Reason.UNAVAILABLE, f"the streams to take over can't be read: {error}") from error
        for work in works:
            assert work.attempt is not None
            work.plan = decide(
                readings[work.key], work.attempt, work.scheduled.sampling, self._settings.poison_attempts_max
            )
            # In the first window after a start nobody had begun most of them: that is no news.
            say = log.debug if work.plan.action is Action.RUN and not any(work.plan.totals) else log.info
            say(
                "took over", request_id=work.scheduled.request_id, action=work.plan.action.name.lower(), accepted=sum(work.plan.totals), detail=work.plan.detail,
            )  # fmt: skip
        return unwritable

    async def _fence(self, works: Sequence[Work]) -> tuple[dict[TopicPartition, int], list[tuple[Work, HeadraceError]]]:
        """Writes the markers; returns, for each partition they went to, the offset of the last, and what could not be written."""
        sends, unwritable = [], []
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
            try:
                sends.append(await tell(self._producer, work, marker))
            except HeadraceError as error:
                if error.retriable:
                    raise
                unwritable.append((work, error))
        last: dict[TopicPartition, int] = {}
        for confirmed in await asyncio.gather(*sends):
            tp = TopicPartition(confirmed.topic, confirmed.partition)
            last[tp] = max(last.get(tp, -1), confirmed.offset)
        return last, unwritable

    async def _read(self, works: Sequence[Work], markers: dict[TopicPartition, int]) -> dict[RequestKey, Reading]:
        """Folds the requests' streams up to the markers."""
        since: dict[TopicPartition, int] = {}
        wanted: dict[tuple[TopicPartition, str], Reading] = {}
        for work in works:
            reply = work.scheduled.reply
            tp = TopicPartition(reply.topic, reply.partition)
            # Not the record's own time: admission may have written it again, after the stream of the first one had begun.
            asked_ms = min(work.timestamp_ms, work.scheduled.requested_ms)
            since[tp] = min(since.get(tp, asked_ms), asked_ms)
            wanted[tp, work.scheduled.request_id] = Reading()
        self._reader.assign(list(since))
        starts = await self._reader.offsets_for_times(
            {tp: max(0, time_ms - CLOCK_SKEW_MS) for tp, time_ms in since.items()}
        )
        left = dict(markers)
        for tp, marker in markers.items():
            found = starts.get(tp)
            self._reader.seek(tp, marker if found is None else min(found.offset, marker))
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while left:
            batches = await self._reader.getmany(*left, timeout_ms=READ_WAIT_MS, max_records=READ_RECORDS_MAX)
            if batches:
                heard_s = loop.time()
            elif loop.time() > heard_s + SILENCE_MAX_S:
                raise HeadraceError(Reason.UNAVAILABLE, f"{next(iter(left))} can't be read up to the marker")
            for tp, records in batches.items():
                for record in records:
                    if record.offset <= markers[tp]:
                        await self._apply(tp, record, wanted)
                if await self._reader.position(tp) > markers[tp]:
                    del left[tp]
        return {
            work.key: wanted[
                TopicPartition(work.scheduled.reply.topic, work.scheduled.reply.partition), work.scheduled.request_id
            ]
            for work in works
        }

    async def _apply(self, tp: TopicPartition, record: Any, wanted: dict[tuple[TopicPartition, str], Reading]) -> None:
        key = (record.key or b"").decode(errors="replace")
        if key and (tp, key) not in wanted:
            return
        try:
            event = await self._decoder.decode(record.value)
        except Undecodable:
            return
        if isinstance(event, Input) and (reading := wanted.get((tp, event.request_id))) is not None:
            reading.apply(event)
