"""Which of this worker's slots are kept for whom: for interactive requests, and for tenants who were promised a share of the model."""

from __future__ import annotations

import time
from dataclasses import replace

from decisions import capacity
from decisions.window import Room, guest_slots, interactive_slots
from infra.directory import TenantDirectory
from infra.settings import KafkaSettings
from schemas.events import ModelVersionRegistered

LOOK_S = 1.0
"""How soon a promise that was given or taken back is kept or forgotten."""


class Promises:
    """Follows the tenants' quotas."""

    def __init__(self, settings: KafkaSettings, version: ModelVersionRegistered, slots: int, tiers: list[str]) -> None:
        """Of a worker with so many slots that serves these tiers."""
        self.slots = slots
        self._tenants = TenantDirectory(settings)
        self._version = version
        self._tiers = tiers
        self._room = Room(slots, interactive_slots(version.interactive_slots, slots, tiers), guest_slots(slots))
        self._looked_s = float("-inf")

    async def start(self) -> None:
        """Read what is promised now, and follow."""
        await self._tenants.start()

    async def stop(self) -> None:
        """Stop following."""
        await self._tenants.stop()

    def room(self, used: int) -> Room:
        """The slots, for whom they are kept, and how many are in use."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            percents = {
                (tier, tenant.tenant): percent
                for tenant in self._tenants.all()
                if tenant.quotas and not tenant.disabled
                for tier in self._tiers
                if (percent := capacity.reserved_percent(tenant.quotas, tier, self._version.model))
            }
            room = self._room
            self._room = replace(room, guaranteed=capacity.slots_of(percents, room.slots))
        return replace(self._room, used=used)
