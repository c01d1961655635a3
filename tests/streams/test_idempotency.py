"""Idempotency keys in a running admission: one request of a key is computed, over kills, restarts and rebalances."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from infra.log import EventDecoder
from infra.read import read_to_end
from schemas.events import (
    InferenceAdmitted,
    InferenceFailed,
    InferenceJoined,
    InferenceRejected,
    InferenceScheduled,
    Quota,
    RequestKeyed,
    Sampling,
)
from schemas.parts import Reply
from schemas.topics import LIFECYCLE, TOKENS, idempotency_topic
from tests.streams.site import WAIT_S, Agent, Site, new_id, open_site
from tests.streams.test_accounts import limit

KEY = "an order"


async def first(site: Site, key: str = KEY) -> InferenceAdmitted:
    """A request under a key that is let in."""
    return await site.of(LIFECYCLE, InferenceAdmitted, await site.ask(idempotency_key=key))


async def joins(site: Site, to: InferenceAdmitted, key: str = KEY) -> InferenceJoined:
    """The same asked again."""
    joined = await site.of(TOKENS, InferenceJoined, await site.ask(idempotency_key=key, stream=False))
    assert (joined.first_request_id, joined.first_reply) == (to.request_id, to.reply)
    assert joined.first_requested_ms == to.requested_ms
    return joined


def joined_total(admission: Agent) -> float:
    found = re.search(r'headrace_requests_joined_total{tier="interactive"} (\S+)', admission.metrics())
    return float(found[1]) if found else 0.0


async def remembered(site: Site) -> list[RequestKeyed]:
    decoder = EventDecoder(site.kafka)
    events = [await decoder.decode(r.value) async for r in read_to_end(site.kafka, idempotency_topic("interactive"))]
    return [event for event in events if isinstance(event, RequestKeyed) and event.tenant == site.tenant]


async def test_many_at_once_are_computed_once_and_charged_once(site: Site, admission: Agent) -> None:
    await limit(site, Quota("interactive", requests_per_minute=2, tokens_per_day=1_000))
    before = await asyncio.to_thread(joined_total, admission)
    rids = await asyncio.gather(*(site.ask(idempotency_key=KEY) for _ in range(30)))
    (work,) = await asyncio.gather(site.one(site.work, InferenceScheduled, lambda event: event.request_id in rids))
    for rid in set(rids) - {work.request_id}:
        joined = await site.of(TOKENS, InferenceJoined, rid)
        assert (joined.first_request_id, joined.first_reply) == (work.request_id, work.reply)
        assert await site.of(LIFECYCLE, InferenceJoined, rid) == joined
    assert len(await site.all(site.work, InferenceScheduled)) == 1
    await first(site, "another")
    refused = await site.of(TOKENS, InferenceRejected, await site.ask(idempotency_key="a third"))
    assert refused.reason == "rate_limited"
    await joins(site, await site.of(LIFECYCLE, InferenceAdmitted, work.request_id))
    assert {record.request_id for record in await remembered(site)} >= {work.request_id}
    assert await asyncio.to_thread(joined_total, admission) == before + 30


async def test_something_else_under_the_same_key_is_refused(site: Site, admission: Agent) -> None:
    await first(site)
    rid = await site.ask("other", idempotency_key=KEY)
    refused = await site.of(TOKENS, InferenceRejected, rid)
    assert (refused.reason, refused.param) == ("conflict", "idempotency_key")
    assert await site.of(LIFECYCLE, InferenceRejected, rid) == refused
    bad = await site.of(TOKENS, InferenceRejected, await site.ask(idempotency_key="é"))
    assert (bad.reason, bad.param) == ("invalid_request", "idempotency_key")


async def test_another_tenants_key_and_a_refused_ones_are_free(site: Site, admission: Agent) -> None:
    await first(site)
    async with open_site(site.kafka) as other:
        await other.of(other.work, InferenceScheduled, await other.ask(idempotency_key=KEY))
    refused = await site.ask(idempotency_key="refused", sampling=Sampling(temperature=9.0))
    await site.of(TOKENS, InferenceRejected, refused)
    await first(site, "refused")


async def test_it_outlives_kills_and_moves(site: Site, admission: Agent, tmp_path: Path) -> None:
    one = await first(site)
    await asyncio.to_thread(admission.kill)
    waiting = [await site.ask(idempotency_key=KEY) for _ in range(3)]
    two = [await site.ask(idempotency_key="while it was away") for _ in range(3)]
    await asyncio.to_thread(admission.start)
    for rid in waiting:
        assert (await site.of(TOKENS, InferenceJoined, rid)).first_request_id == one.request_id
    work = await site.one(site.work, InferenceScheduled, lambda event: event.request_id in two)
    for rid in set(two) - {work.request_id}:
        assert (await site.of(TOKENS, InferenceJoined, rid)).first_request_id == work.request_id
    other = Agent("admission", site.kafka, tmp_path / "other", HEADRACE_ADMISSION_SESSION_TIMEOUT_MS="6000")
    await asyncio.to_thread(other.start)
    await joins(site, one)
    await asyncio.to_thread(admission.kill)
    await joins(site, one)
    await asyncio.to_thread(other.stop)
    await asyncio.to_thread(admission.start)
    await joins(site, one)
    assert len({event.request_id for event in await site.all(site.work, InferenceScheduled)}) == 2


async def test_what_failed_is_computed_anew_and_a_newcomer_knows_that(site: Site, admission: Agent) -> None:
    one = await first(site)
    failed = InferenceFailed(one.request_id, site.tenant, site.model, "v1", "interactive", "worker_lost", "")
    await site.producer.send_and_wait(LIFECYCLE, failed, key=site.tenant)
    async with asyncio.timeout(WAIT_S):
        while not any(record.free for record in await remembered(site)):  # noqa: ASYNC110  # the log is read each time
            await asyncio.sleep(0.3)
    await asyncio.to_thread(admission.kill)
    await asyncio.to_thread(admission.start)
    two = await first(site)
    assert two.request_id != one.request_id
    await joins(site, two)


async def test_a_direct_producer_repeats_its_id(site: Site, admission: Agent) -> None:
    """In JSON, from the same place and from another reply topic's; a front door's repeat of the id joins nothing."""
    rid, own = new_id(), Reply(f"tokens.{site.tenant}", 0, "json")
    asked = {"type": "InferenceRequested", "request_id": rid, "model": site.model, "prompt": "hello"}
    await site.send(json.dumps(asked).encode(), grant=site.grant(own))
    await site.of(site.work, InferenceScheduled, rid)
    await site.send(json.dumps(asked).encode(), grant=site.grant(own))
    joined = await site.of(own.topic, InferenceJoined, rid)
    assert (joined.first_request_id, joined.first_reply) == (rid, own)
    assert site.record_of(own.topic, joined).value[:1] == b"{"
    await site.send(json.dumps({**asked, "prompt": "else"}).encode(), grant=site.grant(own))
    by_key = {**asked, "request_id": new_id(), "idempotency_key": KEY}
    await site.send(json.dumps(by_key).encode(), grant=site.grant(own))
    await site.of(site.work, InferenceScheduled, str(by_key["request_id"]))
    again = {**by_key, "request_id": new_id()}
    await site.send(json.dumps(again).encode(), grant=site.grant(own))
    assert (await site.of(own.topic, InferenceJoined, str(again["request_id"]))).first_request_id == by_key[
        "request_id"
    ]
    assert not await site.all(own.topic, InferenceRejected)
    assert len(await site.all(site.work, InferenceScheduled)) == 2
