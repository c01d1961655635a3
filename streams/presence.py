"""Presence acts: a request that its tenant's limit on requests at once would refuse takes the slot of one whose front door is gone.

`doors` is read into memory. Only who would be refused looks there. It waits, for a while, until it is sure who watches what its tenant has open; then
what nobody watches is cancelled, as its caller would have done, and its ending gives the slot back. Nothing is let in before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from aiokafka import ConsumerRecord

from decisions import admission as rules
from decisions import verdicts
from decisions.cases import Case
from decisions.ledger_rows import Open
from decisions.presence import SILENT_MS, Presence, yielding
from decisions.recalled import Key
from infra import metrics
from infra.log import EventProducer, NoSuchPartition, RecordTooLarge
from infra.settings import KafkaSettings
from infra.views import View
from schemas.events import Event, FrontDoorSeen
from schemas.topics import DOORS
from streams.accounts import Ledgers
from streams.outbox import Outgoing, cut_short, deliver

if TYPE_CHECKING:
    from streams.world import LiveWorld

UNSURE_WAIT_S = SILENT_MS / 1000 + 1.0
"""So long a request waits at most to know who is gone: the time of silence, from a door's last word on and until the next of another is read."""
ENDING_WAIT_S = 5.0
"""How long the ending of what was cancelled may take to be told."""
LOOK_S = 0.1

log = structlog.get_logger("streams.presence")


class LivePresence(View):
    """Which front doors are there, as the log tells it. `looks` counts what it has told."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings, DOORS, self._on_event)
        self.now = Presence()
        self.looks = 0

    def _on_event(self, event: Event, record: ConsumerRecord) -> None:
        if isinstance(event, FrontDoorSeen):
            self.now.heard(event, record.timestamp)
            self.looks += 1


@dataclass(slots=True)
class Asking:
    """A request that would be refused, and what it has found: `ended` made way for it; it waits until `until_s`."""

    began_s: float
    looked: int = -1
    until_s: float = 0.0
    ended: list[Key] = field(default_factory=list)

    def noted(self, case: Case) -> Case:
        """The case with whose slot it takes."""
        if not self.ended:
            return case
        detail = f"{', '.join(name for _, name in self.ended)} had it, whose front door is gone"
        return case.noting("slot", "taken over", detail)


class Slots:
    """Of one tier. The slots of who is gone go to who comes."""

    def __init__(self, world: LiveWorld, ledgers: Ledgers, producer: EventProducer) -> None:
        self._world = world
        self._ledgers = ledgers
        self._producer = producer
        self._ending: set[Key] = set()

    @contextlib.contextmanager
    def asking(self) -> Iterator[Asking]:
        """For one request; what it ends makes way for no other meanwhile."""
        asking = Asking(asyncio.get_running_loop().time())
        try:
            yield asking
        finally:
            self._ending.difference_update(asking.ended)

    async def look(self, case: Case, asking: Asking) -> float:
        """Until when it is worth to wait, by the loop's clock; 0 if it isn't. Ends what nobody watches, if that makes room."""
        presence = self._world.presence
        if asking.ended or presence.looks == asking.looked:
            return asking.until_s
        asking.looked, asking.until_s = presence.looks, 0.0
        accounts = await self._ledgers.of(case.source.partition)
        needed = rules.crowded(case, self._world)  # no pause from here on until what ends is marked
        if accounts is None or not needed:
            return 0.0
        tenant, now_s = case.grant.tenant, asyncio.get_running_loop().time()
        opened = accounts.opened(tenant)
        ending = {request_id for name, request_id in self._ending if name == tenant}
        found = yielding(opened, needed, presence.now, case.requested_ms, case.request.door, ending)
        if found.orphans:
            await self._end(case, {request_id: opened[request_id] for request_id in found.orphans}, asking)
            asking.until_s = now_s + ENDING_WAIT_S
        elif found.unsure:
            patience_s = UNSURE_WAIT_S if case.request.timeout_ms is None else case.request.timeout_ms / 1000
            asking.until_s = asking.began_s + min(UNSURE_WAIT_S, patience_s)
        return asking.until_s

    async def _end(self, case: Case, orphans: dict[str, Open], asking: Asking) -> None:
        """Cancels what nobody watches; its ending is told by `endings`, as any."""
        records: list[Outgoing] = []
        tenant = case.grant.tenant
        for request_id, one in orphans.items():
            asking.ended.append((tenant, request_id))
            self._ending.add((tenant, request_id))
            metrics.SLOTS_TAKEN_OVER.labels(case.tier).inc()
            log.info("a slot is taken over", request_id=request_id, door=one.door, by=case.request.request_id)
            ending, word = verdicts.yielded(request_id, tenant, case.tier)
            records += cut_short(one.reply, ending, word)
        with contextlib.suppress(NoSuchPartition, RecordTooLarge):
            await deliver(self._producer, records)
