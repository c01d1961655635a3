"""What admission knows besides the request: tenants, models, workers, front doors, partition counts, and where work topics end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from decisions.ledger import Counters
from decisions.placement import SeenWorker
from decisions.queues import pool_name
from infra.directory import ModelDirectory, TenantDirectory, WorkerDirectory
from infra.kafka import make_admin, unreachable
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered, TenantChanged
from schemas.reasons import Reason
from streams.accounts import Ledgers
from streams.presence import LivePresence

KNOWN_S = 30.0
"""How long a topic's partition count is believed."""
MISSING_S = 1.0
"""How long a topic is believed not to exist."""
FORGOTTEN_S = 10.0
"""A broker that has just started doesn't know all topics yet: so long one that was there is believed to be."""
TOPICS_MAX = 10_000
NEWCOMER_WAIT_S = 2.0
MODEL_WAIT_S = 0.5
MODEL_MISSING_S = 5.0

log = structlog.get_logger("streams.world")


class PartitionCounts:
    """How many partitions topics have, asked of the broker once in a while. Never creates a topic."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._admin: AIOKafkaAdminClient | None = None
        self._known: dict[str, tuple[int | None, float]] = {}
        self._missed_s: dict[str, float] = {}
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Connect. Raises HeadraceError (unavailable)."""
        self._admin = make_admin(self._settings)
        try:
            await self._admin.start()
        except KafkaError as error:
            raise HeadraceError(Reason.UNAVAILABLE, await unreachable(self._settings, error)) from error

    async def stop(self) -> None:
        """Disconnect."""
        if self._admin is not None:
            await self._admin.close()

    def known(self, topic: str) -> int | None:
        """The count, as last learnt; None if the topic doesn't exist or was never asked for."""
        return self._known.get(topic, (None, 0.0))[0]

    async def learn(self, topic: str) -> None:
        """Make `known` tell the truth about a topic. Keeps the last answer while the broker gives none."""
        if self._fresh(topic):
            return
        async with self._lock:
            if self._fresh(topic):
                return
            found = await self._ask(topic)
            count = found if found is not None else self._remembered(topic)
            if found is not None:
                self._missed_s.pop(topic, None)
            if len(self._known) >= TOPICS_MAX:
                self._known.clear()
                self._missed_s.clear()
            self._known[topic] = count, time.monotonic() + (MISSING_S if found is None else KNOWN_S)

    def _remembered(self, topic: str) -> int | None:
        """The count of a topic that is missed, if it was there not long ago."""
        known = self.known(topic)
        if known is None or time.monotonic() - self._missed_s.setdefault(topic, time.monotonic()) < FORGOTTEN_S:
            return known
        del self._missed_s[topic]
        return None

    def _fresh(self, topic: str) -> bool:
        entry = self._known.get(topic)
        return entry is not None and time.monotonic() < entry[1]

    async def _ask(self, topic: str) -> int | None:
        assert self._admin is not None, "not started"
        try:
            (found,) = await self._admin.describe_topics([topic])
        except KafkaError as error:
            log.warning("can't ask for a topic", topic=topic, error=type(error).__name__)
            return self.known(topic)
        return len(found["partitions"]) if found["error_code"] == 0 else None


class LiveWorld:
    """The world as the log tells it. Implements `decisions.cases.World`."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.counts = PartitionCounts(settings)
        self.models = ModelDirectory(settings)
        self._tenants = TenantDirectory(settings)
        self._workers = WorkerDirectory(settings)
        self.presence = LivePresence(settings)
        self.ledgers: Ledgers | None = None
        self._ends: dict[tuple[str, int], int] = {}
        self._missing: dict[str, float] = {}

    @property
    def failure(self) -> str | None:
        """Why the world is seen as it was and not as it is, or None."""
        ledgers = self.ledgers.failure if self.ledgers is not None else None
        directories = self.models.failure or self._tenants.failure or self._workers.failure
        return directories or self.presence.failure or ledgers

    async def start(self) -> None:
        """Read everything up to now, then follow."""
        await self.counts.start()
        await asyncio.gather(self.models.start(), self._tenants.start(), self._workers.start(), self.presence.start())

    async def stop(self) -> None:
        """Stop following."""
        await asyncio.gather(self.models.stop(), self._tenants.stop(), self._workers.stop(), self.presence.stop())
        await self.counts.stop()

    def tenant(self, name: str) -> TenantChanged | None:
        """The tenant's state."""
        return self._tenants.tenant(name)

    def stable(self, model: str) -> ModelVersionRegistered | None:
        """The version that requests for a model's name go to."""
        return self.models.resolve(model)

    def workers(self, model: str, version: str) -> Sequence[SeenWorker]:
        """The workers of a version, as they last reported."""
        return self._workers.serving(model, version)

    def partitions(self, topic: str) -> int | None:
        """How many partitions a topic has, if `counts` has learnt it."""
        return self.counts.known(topic)

    @property
    def ends(self) -> Mapping[tuple[str, int], int]:
        """By (work topic, partition), the offset after the last record known there."""
        return self._ends

    def start_up_ms(self, model: str, version: str) -> int | None:
        """How long a worker of a version took to be ready, the last time one did."""
        return self._workers.start_up_ms(model, version)

    def counters(self, partition: int, tenant: str) -> Counters:
        """What a tenant has reserved and spent."""
        accounts = self.ledgers.known(partition) if self.ledgers is not None else None
        return accounts.counters(tenant) if accounts is not None else {}

    def open_requests(self, partition: int, tenant: str, model: str, version: str) -> int:
        """How many requests of a tenant to a version are admitted and haven't ended."""
        accounts = self.ledgers.known(partition) if self.ledgers is not None else None
        return accounts.open_requests(tenant, pool_name(model, version)) if accounts is not None else 0

    def queued(self, model: str, version: str) -> int:
        """How many requests to a version wait in the partitions in which this process decides."""
        return self.ledgers.queued(pool_name(model, version)) if self.ledgers is not None else 0

    def queueing(self, pool: str) -> set[str]:
        """The tenants in whose partitions this process decides, and that have requests there which no worker has begun."""
        return self.ledgers.queueing(pool) if self.ledgers is not None else set()

    def queueing_at_most(self, pool: str) -> int:
        """No fewer than `queueing` has: who is in several partitions counts in each."""
        return self.ledgers.queueing_at_most(pool) if self.ledgers is not None else 0

    def placed(self, topic: str, partition: int) -> None:
        """A record is on its way to a partition: the next request sees it there."""
        place = topic, partition
        if place not in self._ends:
            self._ends[place] = max(
                (
                    held.committed
                    for seen in self._workers.all()
                    for held in seen.report.partitions
                    if (held.topic, held.partition) == place
                ),
                default=0,
            )
        self._ends[place] += 1

    def withdrawn(self, topic: str, partition: int) -> None:
        """A record that was `placed` was not written after all: it is nobody's backlog."""
        self._ends[topic, partition] -= 1

    def confirmed(self, topic: str, partition: int, offset: int) -> None:
        """The broker told a record's offset, and with it how much others have written."""
        place = topic, partition
        self._ends[place] = max(self._ends.get(place, 0), offset + 1)

    async def meet_model(self, model: str) -> None:
        """Wait a little for a model that the directory doesn't know; not again soon for one that didn't come."""
        now_s = time.monotonic()
        if self.stable(model) is not None or now_s < self._missing.get(model, 0.0):
            return
        if not await self.models.until(lambda: self.stable(model) is not None, MODEL_WAIT_S):
            if len(self._missing) >= TOPICS_MAX:
                self._missing.clear()
            self._missing[model] = now_s + MODEL_MISSING_S

    async def meet(self, tenant: str, key_id: str) -> None:
        """Wait a little for a tenant or key that the directory doesn't know yet: it may be newer than what was read of it."""
        if not self._knows(tenant, key_id):
            await self._tenants.until(lambda: self._knows(tenant, key_id), NEWCOMER_WAIT_S)

    def _knows(self, tenant: str, key_id: str) -> bool:
        found = self.tenant(tenant)
        return found is not None and any(key.key_id == key_id for key in found.keys)
