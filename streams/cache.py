"""The response cache acts: admission looks answers up in it, and fills it from `answers`.

With the store in memory each process follows all of `answers` from its end; with one that processes share, they share the reading, too, as one
consumer group. Nothing is read while no model has a response cache. Whatever goes wrong here costs hits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.errors import KafkaError

from decisions.cache import Entry, may_be_kept
from decisions.cases import Case
from infra import metrics
from infra.answer_cache import Stored, make_cache, shared_by_processes
from infra.kafka import Batching, make_consumer, stop_consumer
from infra.log import EventDecoder
from infra.read import assign_all
from infra.settings import AdmissionSettings
from schemas.errors import HeadraceError, Undecodable
from schemas.events import InferenceAnswered, InferenceScheduled
from schemas.recent import Recent
from schemas.topics import ANSWERS, CACHE_HEADER
from streams.world import LiveWorld

GROUP = "cache"
"""The consumer group of those who fill one store."""
LOOK_S = 1.0
"""How often it is looked whether any model has a response cache."""
RETRY_S = 1.0
POLL_MS = 200
FETCH_WAIT_MS, FETCH_BYTES_MIN = 100, 64 * 1024
EQUALS_MAX, EQUALS_S = 10_000, 60.0
"""Of so many requests it is remembered, for so long after the last equal one, where their work went."""

log = structlog.get_logger("streams.cache")


class ResponseCache:
    """What is kept of answers, and where equal work went."""

    def __init__(self, settings: AdmissionSettings, world: LiveWorld, decoder: EventDecoder) -> None:
        """Raises SettingsError if the setting names no store."""
        self._kafka = settings.kafka
        self._store = make_cache(settings.cache_url)
        self._shared = shared_by_processes(settings.cache_url)
        self._world = world
        self._decoder = decoder
        self._went = Recent[int](EQUALS_MAX, EQUALS_S)
        self._filling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Fill it from now on."""
        self._filling = asyncio.create_task(self._fill(), name="response cache")

    async def stop(self) -> None:
        """Stop filling, and let go of the store."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        await self._store.close()

    # --- asking --------------------------------------------------------------------------------------------------------

    async def look_up(self, case: Case) -> Case:
        """A keyed case with what is kept under its key, and where equal work went last."""
        if not case.cache_key or not case.policy.read:
            return case
        entry = await self._entry(case.routed.model, case.cache_key)
        return case.having(entry=entry, beside=self._went.get(case.cache_key) if case.policy.shares else None)

    async def _entry(self, model: str, key: str) -> Entry | None:
        stored = await self._store.get(model, key)
        if stored is None:
            return None
        try:
            answer = await self._decoder.decode(stored.value)
        except HeadraceError as error:  # of a version that writes what this one can't read
            log.warning("a kept answer can't be read", error=error.message)
            return None
        if not isinstance(answer, InferenceAnswered) or answer.error_reason is not None:
            return None
        return Entry(answer, stored.stored_ms)

    def count(self, case: Case) -> None:
        """A case is decided: what the cache had to do with it."""
        for decision in case.decisions:
            if decision.check == "cache":
                metrics.of(metrics.CACHE_LOOKUPS, case.routed.model, decision.outcome).inc()

    def went(self, work: InferenceScheduled, partition: int) -> None:
        """Work goes to a partition: equal work that follows is drawn there."""
        if work.shared:
            self._went.put(work.cache_key, partition)

    # --- filling -------------------------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> bool:
        return any(version.cache_ttl_ms for version in self._world.models.all())

    async def _fill(self) -> None:
        while True:
            if not self._wanted:
                await asyncio.sleep(LOOK_S)
                continue
            try:
                await self._follow()
            except (KafkaError, HeadraceError, OSError) as error:
                log.warning("answers can't be followed", error=repr(error))
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Until no model has a response cache any more."""
        batching = Batching(FETCH_WAIT_MS, FETCH_BYTES_MIN)
        arguments = batching.arguments | {"auto_offset_reset": "latest", "enable_auto_commit": self._shared}
        consumer = make_consumer(self._kafka, group=GROUP if self._shared else None, **arguments)
        try:
            await consumer.start()
            if self._shared:
                consumer.subscribe([ANSWERS])
            else:
                await _assign_ends(consumer)
            while self._wanted:
                until_s = time.monotonic() + LOOK_S
                while time.monotonic() < until_s:
                    batches = await consumer.getmany(timeout_ms=POLL_MS)
                    batching.heard(consumer, bool(batches))
                    for record in (record for records in batches.values() for record in records):
                        await self._take(record)
        finally:
            await stop_consumer(consumer)

    async def _take(self, record: ConsumerRecord) -> None:
        """Keep an answer. One that says in no header that it may be kept isn't even decoded."""
        if not any(name == CACHE_HEADER for name, _ in record.headers) or record.value is None:
            return
        answer: object = None
        with contextlib.suppress(Undecodable):
            answer = await self._decoder.decode_record(record.value)  # one that is by reference is too large to be kept
        if not isinstance(answer, InferenceAnswered) or not may_be_kept(answer, len(record.value)):
            return
        version = self._world.models.version(answer.model, answer.version)
        left_ms = 0 if version is None else version.cache_ttl_ms - max(0, int(time.time() * 1000) - record.timestamp)
        if version is None or left_ms <= 0:
            return
        stored = Stored(record.value, record.timestamp)
        kept = await self._store.put(answer.model, answer.cache_key, stored, left_ms, version.cache_bytes)
        if kept is not None:
            metrics.CACHE_BYTES.labels(answer.model).set(kept)


async def _assign_ends(consumer: AIOKafkaConsumer) -> None:
    """Raises HeadraceError (unavailable) if the topic isn't there."""
    for place, end in (await assign_all(consumer, ANSWERS)).items():
        consumer.seek(place, end)
