"""Removes payloads that no record refers to any more, once in a while. Every `lifecycle` does so; several do no harm."""

from __future__ import annotations

import asyncio
import time

import structlog

from infra import metrics
from infra.objects import ObjectStore, make_store
from infra.settings import LifecycleSettings
from schemas.errors import HeadraceError
from schemas.payloads import FOLDER

FIRST_SWEEP_S = 60.0
"""How long after its start a process sweeps first, at most."""

log = structlog.get_logger("streams.payloads")


async def sweep(store: ObjectStore, older_than_ms: int) -> int:
    """Remove the payloads that were put before a time; how many. Raises HeadraceError (unavailable)."""
    removed = 0
    async for found in store.listed(FOLDER):
        if found.modified_ms < older_than_ms:
            await store.delete(found.key)
            removed += 1
    return removed


async def sweep_regularly(settings: LifecycleSettings) -> None:
    """Sweep for as long as the process runs. A store that is away is swept the next time."""
    store = make_store(settings.objects, settings.data_dir)
    interval_s = settings.sweep_interval_ms / 1000
    try:
        await asyncio.sleep(min(FIRST_SWEEP_S, interval_s))
        while True:
            try:
                removed = await sweep(store, int(time.time() * 1000) - settings.payload_retention_ms)
            except HeadraceError as error:
                log.warning("payloads can't be swept yet", error=error.message)
            else:
                metrics.PAYLOADS.labels("swept").inc(removed)
                log.info("payloads are swept", store=store.name, removed=removed)
            await asyncio.sleep(interval_s)
    finally:
        await store.close()
