"""Revocation acts: what was let in with a key that is revoked now is cancelled, whoever waits for it.

A front door ends what its own callers have open, and tells them why; it is given the time for that. What is left after that is a direct
producer's, or of a caller who left: it is ended here, by the records that a cancel causes, by whoever decides the tenant's requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from decisions import verdicts
from decisions.accounts import Key
from decisions.ledger_rows import Open
from decisions.revocation import barred
from infra.log import EventProducer, NoSuchPartition, RecordTooLarge
from schemas.errors import HeadraceError
from streams.accounts import Ledgers
from streams.outbox import Outgoing, cut_short, deliver

if TYPE_CHECKING:
    from streams.world import LiveWorld

LOOK_S = 0.25
GRACE_S = 1.0
"""So long front doors have for what they have open."""
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
        self._found: dict[Key, float] = {}
        self._ended: set[Key] = set()

    async def run(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except HeadraceError as error:
                log.warning("what is revoked can't be ended", error=error.message)

    async def look(self) -> None:
        """Ends what was found long enough ago and is open still, once. Raises HeadraceError if the log doesn't take it; then the next look does."""
        now_s = self._clock()
        found = {
            (tenant, request_id): opened[request_id]
            for tenant, opened in self._ledgers.opened()
            for request_id in barred(opened, self._world.tenant(tenant))
        }
        self._found = {key: self._found.get(key, now_s) for key in found}
        self._ended &= found.keys()
        due = [key for key, at_s in self._found.items() if key not in self._ended and at_s + GRACE_S <= now_s]
        for key in due[:ENDED_AT_ONCE_MAX]:
            await self._end(*key, found[key])
            self._ended.add(key)

    async def _end(self, tenant: str, request_id: str, one: Open) -> None:
        log.info("a revoked key's request is ended", request_id=request_id, tenant=tenant, key_id=one.key_id)
        ending, word = verdicts.revoked(request_id, tenant, self._tier)
        records: list[Outgoing] = cut_short(one.reply, ending, word)
        with contextlib.suppress(NoSuchPartition, RecordTooLarge):
            await deliver(self._producer, records)
