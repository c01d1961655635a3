"""Who has enough in a pool's queue waits in a running admission: in order, for no longer than its deadline, and in nobody's way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.settings import KafkaSettings
from schemas.events import (
    ApiKey,
    Attempt,
    InferenceAdmitted,
    InferenceCancelled,
    InferenceFailed,
    InferenceRejected,
    InferenceScheduled,
    InferenceStarted,
    ModelVersionRegistered,
    Position,
    TenantChanged,
)
from schemas.topics import LIFECYCLE, REGISTRY, TENANTS, TOKENS
from tests.streams.site import CONTEXT, Agent, Site, new_id, now_ms

pytestmark = [pytest.mark.kafka]

ALONE = 96
"""Three quarters of two windows of 64: what a tenant that is alone may have before workers."""
FEW = 3
SHORT_MS = 700
READ_S = 0.2
"""Within that admission surely has a record, and would have decided it."""


@pytest.fixture
async def narrow(site: Site) -> Site:
    """The site's model with few slots, so that its windows are small."""
    version = ModelVersionRegistered(
        site.model, "v1", "scripted", "", CONTEXT, tokenizer="bytes", partitions=2, slots=8
    )
    await site.producer.send_and_wait(REGISTRY, version, key=site.model)
    return site


async def fill(site: Site) -> list[str]:
    """So many requests that the next must wait for its turn."""
    rids = [await site.ask() for _ in range(ALONE)]
    for rid in rids:
        await site.of(LIFECYCLE, InferenceAdmitted, rid)
    return rids


async def begin(site: Site, *rids: str) -> None:
    """A worker is told to have begun these."""
    for rid in rids:
        admitted = await site.of(LIFECYCLE, InferenceAdmitted, rid)
        started = InferenceStarted(
            rid, site.tenant, site.model, "v1", "interactive", Attempt(1, 1), "w", 0.0, Position(TOKENS, 3, 0)
        )
        partition = admitted.source.partition
        await site.producer.send_and_wait(LIFECYCLE, started, key=site.tenant, partition=partition)


async def held(site: Site, **how: Any) -> str:
    """A request that is read and not decided."""
    rid = await site.ask(**how)
    await asyncio.sleep(READ_S)
    assert not await site.all(LIFECYCLE, InferenceAdmitted, lambda event: event.request_id == rid)
    return rid


@pytest.mark.usefixtures("admission")
async def test_beyond_its_share_a_tenant_waits_until_one_of_its_own_begins_and_in_order(narrow: Site) -> None:
    first = await fill(narrow)
    waiting = [await held(narrow) for _ in range(FEW)]
    await begin(narrow, *first[:FEW])
    admitted = [await narrow.of(LIFECYCLE, InferenceAdmitted, rid) for rid in waiting]
    offsets = [narrow.record_of(LIFECYCLE, event).offset for event in admitted]
    assert offsets == sorted(offsets)
    for event in admitted:
        (turn,) = [decision for decision in event.decisions if decision.check == "turn"]
        assert "until the tenant's turn" in turn.detail
    assert not [
        decision
        for decision in (await narrow.of(LIFECYCLE, InferenceAdmitted, first[0])).decisions
        if decision.check == "turn"
    ]


@pytest.mark.usefixtures("admission")
async def test_a_flood_stands_in_no_other_tenants_way(narrow: Site) -> None:
    await fill(narrow)
    for _ in range(FEW):
        await held(narrow)
    other = replace(narrow, tenant=f"o{narrow.tenant}", seen=narrow.seen)
    other._consumer = narrow._consumer
    key = ApiKey("k1", "0" * 64, ("interactive",), now_ms())
    await narrow.producer.send_and_wait(
        TENANTS, TenantChanged(other.tenant, "salt", (key,), now_ms()), key=other.tenant
    )
    for _ in range(FEW):
        await other.of(narrow.work, InferenceScheduled, await other.ask())


@pytest.mark.usefixtures("admission")
async def test_who_waits_hears_at_its_deadline(narrow: Site) -> None:
    await fill(narrow)
    rid = await held(narrow, timeout_ms=SHORT_MS)
    narrow.heard_in_time(await narrow.of(TOKENS, InferenceRejected, rid), SHORT_MS)
    assert not await narrow.all(narrow.work, InferenceScheduled, lambda event: event.request_id == rid)


@pytest.mark.usefixtures("admission")
async def test_who_waits_can_be_cancelled_and_is_never_let_in(narrow: Site) -> None:
    first = await fill(narrow)
    rid, next_one = await held(narrow), await held(narrow)
    await narrow.send(InferenceCancelled(rid))
    assert (await narrow.of(TOKENS, InferenceFailed, rid)).reason == "cancelled"
    told = await narrow.of(LIFECYCLE, InferenceRejected, rid)
    assert (told.reason, told.model) == ("cancelled", narrow.model)  # should its record come again
    await begin(narrow, *first[:FEW])
    await narrow.of(LIFECYCLE, InferenceAdmitted, next_one)
    assert not await narrow.all(LIFECYCLE, InferenceAdmitted, lambda event: event.request_id == rid)


@pytest.mark.usefixtures("admission")
async def test_whose_key_is_revoked_hears_so_while_it_waits(narrow: Site) -> None:
    await fill(narrow)
    rid = await held(narrow)
    key = ApiKey(narrow.key_id, "0" * 64, ("interactive",), now_ms(), revoked_ms=now_ms())
    await narrow.producer.send_and_wait(
        TENANTS, TenantChanged(narrow.tenant, "salt", (key,), now_ms()), key=narrow.tenant
    )
    assert (await narrow.of(TOKENS, InferenceRejected, rid)).reason == "invalid_api_key"


@pytest.mark.usefixtures("admission")
async def test_asked_again_while_it_waits_it_is_let_in_once(narrow: Site) -> None:
    first = await fill(narrow)
    rid = new_id()
    for _ in range(FEW):
        await held(narrow, rid=rid)
    await begin(narrow, *first[:FEW])
    await narrow.of(narrow.work, InferenceScheduled, rid)
    await narrow.of(LIFECYCLE, InferenceAdmitted, await narrow.ask())
    assert len(await narrow.all(narrow.work, InferenceScheduled, lambda event: event.request_id == rid)) == 1


async def test_killed_with_requests_on_its_hands_it_takes_them_up_again(
    narrow: Site, kafka: KafkaSettings, tmp_path: Path
) -> None:
    agent = Agent("admission", kafka, tmp_path, HEADRACE_ADMISSION_SESSION_TIMEOUT_MS="6000")
    agent.start()
    first = await fill(narrow)
    waiting = [await held(narrow) for _ in range(FEW)]
    agent.kill()
    agent.start()
    await begin(narrow, *first[:FEW])
    for rid in waiting:
        await narrow.of(narrow.work, InferenceScheduled, rid)
    assert agent.stop() == 0
