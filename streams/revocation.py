"""Revocation acts: what was let in with a key that is revoked now is ended, whoever waits for it, by whoever decides the tenant's requests.

A front door tells its own callers why, as soon as it hears of it, and writes nothing: so the stream's one ending tells its other readers the same,
such as the callers of a front door that hears of it late.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from decisions import verdicts
from decisions.ledger_rows import Open
from decisions.recalled import Key
from decisions.revocation import barred
from infra.log import EventProducer, NoSuchPartition, RecordTooLarge
from schemas.errors import HeadraceError
from schemas.events import TenantChanged
from streams.accounts import Ledgers
from streams.outbox import Outgoing, cut_short, deliver

if TYPE_CHECKING:
    from streams.world import LiveWorld

LOOK_S = 0.25
FRESH_S = 60.0
"""So long after a tenant's keys have changed, and until all is ended, its open requests are looked at: what it asks from then on is refused."""
ENDED_AT_ONCE_MAX = 500

log = structlog.get_logger("streams.revocation")


class Revocations:
    """Of one tier."""

    def __init__(
        self,
        world: LiveWorld,
        ledgers: Ledgers,
        producer: EventProducer,
        tier: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._ledgers = ledgers
        self._producer = producer
        self._tier = tier
        self._clock = clock
        self._ended: set[Key] = set()
        self._unended: set[str] = set()
        self._told: dict[str, tuple[TenantChanged | None, float]] = {}

    async def run(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except HeadraceError as error:
                log.warning("what is revoked can't be ended", error=error.message)

    async def look(self) -> None:
        """Ends what is found, once. Raises HeadraceError if the log doesn't take it; then the next look does."""
        now_s = self._clock()
        opened_by = dict(self._ledgers.opened())
        self._told = {name: self._told_of(name, now_s) for name in opened_by}
        found = {
            (name, request_id): opened_by[name][request_id]
            for name, (tenant, at_s) in self._told.items()
            if now_s < at_s + FRESH_S or name in self._unended
            for request_id in barred(opened_by[name], tenant)
        }
        self._ended &= found.keys()
        try:
            for key in [key for key in found if key not in self._ended][:ENDED_AT_ONCE_MAX]:
                await self._end(*key, found[key])
                self._ended.add(key)
        finally:
            self._unended = {name for name, request_id in found if (name, request_id) not in self._ended}

    def _told_of(self, name: str, now_s: float) -> tuple[TenantChanged | None, float]:
        """A tenant's state, and since when it is this one."""
        tenant, known = self._world.tenant(name), self._told.get(name)
        return known if known is not None and known[0] is tenant else (tenant, now_s)

    async def _end(self, tenant: str, request_id: str, one: Open) -> None:
        log.info("a revoked key's request is ended", request_id=request_id, tenant=tenant, key_id=one.key_id)
        ending, word = verdicts.revoked(request_id, tenant, self._tier)
        records: list[Outgoing] = cut_short(one.reply, ending, word)
        with contextlib.suppress(NoSuchPartition, RecordTooLarge):
            await deliver(self._producer, records)
