"""Limits in a running admission: kept over kills, restarts and rebalances, by what `lifecycle` tells and what the rows have saved."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from infra.log import EventDecoder
from infra.read import read_to_end
from infra.settings import KafkaSettings
from schemas.events import (
    ApiKey,
    InferenceAdmitted,
    InferenceFailed,
    InferenceRejected,
    InferenceScheduled,
    LedgerSaved,
    Quota,
    Reply,
    Sampling,
    TenantChanged,
)
from schemas.topics import LIFECYCLE, TENANTS, TOKENS, ledger_topic
from tests.streams.lives import admit, complete
from tests.streams.site import WAIT_S, Agent, Site, new_id, now_ms

SAVED_WAIT_S = 20.0
READ_S = 0.5
"""Within that admission surely has a record."""
ROOM_S_MAX = 20.0
PROMPT, ANSWER = "hello", 20
COST = len(PROMPT) + ANSWER
MINUTE_MS, LEFT_MS, CLOSE_MS = 60_000, 5_000, 200
PER_REQUEST = "requests_per_minute", "concurrent_requests"
PER_TOKEN = "tokens_per_minute", "tokens_per_day", "tokens_per_month"


@pytest.fixture
async def admission(kafka: KafkaSettings, tmp_path: Path) -> AsyncIterator[Agent]:
    """An admission that a test may kill."""
    agent = Agent("admission", kafka, tmp_path, HEADRACE_ADMISSION_SESSION_TIMEOUT_MS="6000")
    await asyncio.to_thread(agent.start)
    yield agent
    await asyncio.to_thread(agent.stop)


async def limit(site: Site, *quotas: Quota) -> None:
    """From the next request on: it comes by a new key, which admission doesn't know before it knows of the limits."""
    site.key_id = f"k{secrets.token_hex(4)}"
    key = ApiKey(site.key_id, "0" * 64, ("interactive",), now_ms())
    await site.producer.send_and_wait(
        TENANTS, TenantChanged(site.tenant, "salt", (key,), now_ms(), quotas=quotas), key=site.tenant
    )


async def asked(site: Site, rid: str | None = None) -> InferenceAdmitted | InferenceRejected:
    """The verdict of one more request."""
    return await verdict_of(site, await site.ask(PROMPT, rid, sampling=Sampling(max_tokens=ANSWER)))


async def verdict_of(site: Site, request_id: str) -> InferenceAdmitted | InferenceRejected:
    found: InferenceAdmitted | InferenceRejected = await site.one(
        LIFECYCLE,
        InferenceAdmitted | InferenceRejected,  # type: ignore[arg-type]
        lambda event: event.request_id == request_id,
    )
    return found


async def let_in(site: Site) -> InferenceAdmitted:
    verdict = await asked(site)
    assert isinstance(verdict, InferenceAdmitted), verdict
    return verdict


async def refused(site: Site) -> InferenceRejected:
    verdict = await asked(site)
    assert isinstance(verdict, InferenceRejected), verdict
    assert verdict.reason == "rate_limited"
    return verdict


async def until_let_in(site: Site) -> None:
    """What ended is heard of soon."""
    async with asyncio.timeout(ROOM_S_MAX):
        while not isinstance(await asked(site), InferenceAdmitted):  # noqa: ASYNC110  # it is asked each time
            await asyncio.sleep(0.05)


async def saved(site: Site) -> None:
    """Returns once the tenant's ledger has a row."""
    decoder = EventDecoder(site.kafka)
    async with asyncio.timeout(SAVED_WAIT_S):
        while True:
            async for record in read_to_end(site.kafka, ledger_topic("interactive")):
                row = await decoder.decode(record.value) if record.value else None
                if isinstance(row, LedgerSaved) and row.tenant == site.tenant and row.open:
                    return
            await asyncio.sleep(0.3)


async def test_a_refusal_says_when_to_come_again_and_what_is_left(site: Site, admission: Agent) -> None:
    await limit(site, Quota("interactive", tokens_per_minute=2 * COST, requests_per_minute=10))
    first = await let_in(site)
    await let_in(site)
    refusal = await refused(site)
    assert first.scopes == ("",)
    assert first.reserved_tokens == COST
    assert refusal.retry_after_ms is not None
    assert 0 < refusal.retry_after_ms <= 61_000
    assert refusal.rates is not None and refusal.rates.tokens is not None and refusal.rates.requests is not None
    assert (refusal.rates.tokens.limit, refusal.rates.tokens.remaining) == (2 * COST, 0)
    assert (refusal.rates.requests.limit, refusal.rates.requests.remaining) == (10, 8)
    work = await site.of(site.work, InferenceScheduled, first.request_id)
    assert work.rates is not None and work.rates.tokens is not None
    assert work.rates.tokens.remaining == COST


async def test_of_those_who_ask_about_the_moment_that_was_told_the_first_at_or_after_it_is_let_in_and_none_before(
    site: Site, admission: Agent
) -> None:
    """A request of nearly a minute ago is the first to be out of the minute. The broker dates each record, so it is asked without a rest."""
    await limit(site, Quota("interactive", requests_per_minute=1_000))
    ago = await admit(site, ago_ms=MINUTE_MS - LEFT_MS)
    free_ms = ago.requested_ms + MINUTE_MS
    await complete(site, ago.request_id)
    await asyncio.sleep(READ_S)
    let_in_here = 0
    async with asyncio.timeout(WAIT_S):
        told = 0
        while told <= let_in_here:
            work = await site.of(site.work, InferenceScheduled, (await let_in(site)).request_id)
            assert work.rates is not None and work.rates.requests is not None
            let_in_here, told = let_in_here + 1, 1_000 - work.rates.requests.remaining
    await limit(site, Quota("interactive", requests_per_minute=let_in_here + 1))
    verdicts: list[InferenceAdmitted | InferenceRejected] = [await refused(site)]
    await asyncio.sleep(max(0, free_ms - CLOSE_MS - now_ms()) / 1_000)
    ids, asked_ms = list[str](), 0
    while asked_ms < free_ms + CLOSE_MS:
        asked_ms = now_ms()
        ids.append(await site.ask(PROMPT, sampling=Sampling(max_tokens=ANSWER)))
    verdicts += [await verdict_of(site, request_id) for request_id in ids]
    for early in (verdict for verdict in verdicts if verdict.requested_ms < free_ms):
        assert isinstance(early, InferenceRejected), early
        assert early.requested_ms + (early.retry_after_ms or 0) == free_ms, early
    first, *others = (verdict for verdict in verdicts if verdict.requested_ms >= free_ms)
    assert isinstance(first, InferenceAdmitted), first
    assert {type(other) for other in others} <= {InferenceRejected}


async def test_an_ending_makes_room(site: Site, admission: Agent) -> None:
    await limit(site, Quota("interactive", concurrent_requests=1))
    first = await let_in(site)
    await refused(site)
    await complete(site, first.request_id)
    await until_let_in(site)


async def test_who_asks_right_after_an_answer_is_not_refused(site: Site, admission: Agent) -> None:
    """The ending is told a little later than the answer."""
    await limit(site, Quota("interactive", concurrent_requests=1))
    first = await let_in(site)
    asking = asyncio.create_task(let_in(site))
    await asyncio.sleep(0.1)
    await complete(site, first.request_id)
    await asking


@pytest.mark.parametrize("with_row", [False, True])
async def test_what_was_reserved_outlives_a_kill(site: Site, admission: Agent, with_row: bool) -> None:
    await limit(site, Quota("interactive", concurrent_requests=2))
    first, second = await let_in(site), await let_in(site)
    if with_row:
        await saved(site)
    await asyncio.to_thread(admission.kill)
    await complete(site, first.request_id)
    await asyncio.to_thread(admission.start)
    await until_let_in(site)
    await refused(site)
    await complete(site, second.request_id)
    await until_let_in(site)


async def test_a_second_admission_knows_what_the_first_let_in(site: Site, admission: Agent, tmp_path: Path) -> None:
    await limit(site, Quota("interactive", concurrent_requests=3))
    other = Agent("admission", site.kafka, tmp_path / "other", HEADRACE_ADMISSION_SESSION_TIMEOUT_MS="6000")
    await let_in(site)
    await asyncio.to_thread(other.start)
    await let_in(site)
    await asyncio.to_thread(admission.kill)
    await let_in(site)
    await refused(site)
    await asyncio.to_thread(other.stop)
    await asyncio.to_thread(admission.start)
    await refused(site)


async def test_many_at_once_pass_no_limit(site: Site, admission: Agent) -> None:
    await limit(site, Quota("interactive", tokens_per_day=10 * COST + 3))
    verdicts = await asyncio.gather(*(site.ask(PROMPT, sampling=Sampling(max_tokens=ANSWER)) for _ in range(50)))

    def ours(event: InferenceAdmitted | InferenceRejected) -> bool:
        return event.request_id in verdicts

    async with asyncio.timeout(WAIT_S):
        while True:
            let = await site.all(LIFECYCLE, InferenceAdmitted, ours)
            out = await site.all(LIFECYCLE, InferenceRejected, ours)
            if len(let) + len(out) == 50:
                break
    assert len(let) == 10
    assert {event.reason for event in out} == {"rate_limited"}


async def test_what_is_refused_for_whatever_reason_leaves_room_for_all_that_the_limits_say(
    site: Site, admission: Agent
) -> None:
    """Had one of them used up anything of any limit, the last request would find no room. All reasons are in `decisions`' tests."""
    limits: dict[str, Any] = dict.fromkeys(PER_REQUEST, 3) | dict.fromkeys(PER_TOKEN, 3 * COST)
    await limit(site, Quota("interactive", **limits))
    first = await site.ask(PROMPT, idempotency_key="k", sampling=Sampling(max_tokens=ANSWER))
    await site.of(LIFECYCLE, InferenceAdmitted, first)
    elsewhere = site.grant(Reply(f"tokens.{site.tenant}", 0))
    ways: list[tuple[str, dict[str, Any]]] = [
        ("rate_limited", {"sampling": Sampling(max_tokens=3 * COST)}),
        ("context_length_exceeded", {"sampling": Sampling(max_tokens=1_000)}),
        ("invalid_request", {"sampling": Sampling(temperature=9.0)}),
        ("invalid_request", {"sampling": Sampling(logit_bias={"99999999": 5.0})}),
        ("model_not_found", {"model": "nothing-like-it"}),
        ("conflict", {"idempotency_key": "k"}),
        ("grant_expired", {"send": {"grant": site.grant(valid_ms=-60_000)}}),
        ("permission_denied", {"send": {"grant": site.grant(tiers=("batch",))}}),
        ("conflict", {"rid": first, "send": {"grant": elsewhere}}),
    ]
    for reason, how in ways:
        rid = await site.ask("other", **how)
        told = await site.of(f"tokens.{site.tenant}" if rid == first else TOKENS, InferenceRejected, rid)
        assert told.reason == reason, how
    await let_in(site)
    await let_in(site)
    refusal = await refused(site)
    assert refusal.rates is not None and refusal.rates.tokens is not None and refusal.rates.requests is not None
    assert (refusal.rates.tokens.remaining, refusal.rates.requests.remaining) == (0, 0)


async def test_the_same_id_again_reserves_nothing(site: Site, admission: Agent) -> None:
    """A producer that isn't sure whether its record was taken writes it again."""
    await limit(site, Quota("interactive", requests_per_minute=2))
    rid = new_id()
    await site.ask(PROMPT, rid)
    await site.of(LIFECYCLE, InferenceAdmitted, rid)
    await site.ask(PROMPT, rid)
    await let_in(site)
    await refused(site)
    assert len(await site.all(LIFECYCLE, InferenceAdmitted, lambda event: event.request_id == rid)) == 1


async def test_an_id_that_another_stream_has_is_refused_there(site: Site, admission: Agent) -> None:
    rid, elsewhere = new_id(), Reply(f"tokens.{site.tenant}", 0)
    await site.ask(PROMPT, rid)
    await site.of(LIFECYCLE, InferenceAdmitted, rid)
    await site.ask(PROMPT, rid, send={"grant": site.grant(elsewhere)})
    refusal = await site.of(elsewhere.topic, InferenceRejected, rid)
    assert (refusal.reason, refusal.param) == ("conflict", "request_id")
    assert not await site.all(TOKENS, InferenceRejected, lambda event: event.request_id == rid)


async def test_what_was_cancelled_before_it_came_reserves_nothing(site: Site, admission: Agent) -> None:
    await limit(site, Quota("interactive", concurrent_requests=1))
    rid = new_id()
    ended = InferenceFailed(rid, site.tenant, "", "", "interactive", "cancelled", "", source="cancel")
    await site.producer.send_and_wait(LIFECYCLE, ended, key=site.tenant)
    await asyncio.sleep(0.5)
    await site.ask(PROMPT, rid)
    await let_in(site)
    assert not await site.all(LIFECYCLE, InferenceAdmitted, lambda event: event.request_id == rid)
