from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

import pytest

from infra.log import EventProducer
from infra.settings import KafkaSettings
from schemas.events import ModelVersionRegistered, Quota, TenantChanged
from schemas.topics import TENANTS
from workers import promises
from workers.promises import Promises

pytestmark = pytest.mark.kafka
WAIT_S = 20.0


async def test_what_tenants_are_promised_is_kept_and_forgotten_again(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "LOOK_S", 0.0)
    model, name = f"m{secrets.token_hex(4)}", f"t{secrets.token_hex(4)}"
    producer = EventProducer(kafka, "test")
    await producer.start()
    kept = Promises(kafka, ModelVersionRegistered(model, "1", "scripted", "", 100), 16, ["interactive", "batch"])
    try:
        await kept.start()
        assert (kept.room(3).slots, kept.room(3).interactive, kept.room(3).guests, kept.room(3).used) == (16, 2, 2, 3)
        assert kept.room(0).guaranteed == {}
        tenant = TenantChanged(name, "salt", (), 1, quotas=(Quota("batch", "", model, reserved_percent=25),))
        for state, expected in (
            (tenant, {("batch", name): 4}),
            (replace(tenant, disabled=True), {}),
            (tenant, {("batch", name): 4}),
            (replace(tenant, quotas=()), {}),
        ):
            await producer.send_and_wait(TENANTS, state, key=name)
            async with asyncio.timeout(WAIT_S):
                while kept.room(0).guaranteed != expected:  # noqa: ASYNC110  # it tells nobody
                    await asyncio.sleep(0.05)
    finally:
        await kept.stop()
        await producer.stop()
