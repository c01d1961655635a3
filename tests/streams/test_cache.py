"""The response cache on a real broker, in memory and in Redis: filled from `answers`, told as one stream, and never in an answer's way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiokafka import ConsumerRecord

from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationStarted,
    InferenceAdmitted,
    InferenceAnswered,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceScheduled,
    InferenceStarted,
    ModelPromoted,
    ModelVersionRegistered,
    Quota,
    Reply,
    Sampling,
    Timings,
    TokensGenerated,
    Usage,
)
from schemas.topics import ANSWERS, CACHE_HEADER, LIFECYCLE, REGISTRY, TOKENS, model_topics
from tests.redis_server import RedisServer
from tests.streams.site import CONTEXT, WAIT_S, Agent, Site, new_id, open_site
from tests.streams.test_accounts import limit

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("endings", "admission")]
GREEDY = Sampling(temperature=0.0, max_tokens=50)
ATTEMPT = Attempt(3, 1)
TEXT = "a headrace leads water to the wheel, " * 2
PLENTY = 100_000
"""Tokens a day."""


@pytest.fixture(scope="module", params=["memory", "redis"])
def redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer | None]:
    """The Redis that admission uses; None where it keeps answers in memory."""
    if request.param == "memory":
        yield None
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def admission(
    kafka: KafkaSettings, redis: RedisServer | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Agent]:
    """A running admission with that cache."""
    given = {} if redis is None else {"HEADRACE_ADMISSION_CACHE_URL": redis.url}
    agent = Agent("admission", kafka, tmp_path_factory.mktemp("admission"), **given)
    agent.start()
    yield agent
    assert agent.stop() == 0, agent.last_words()


async def register(site: Site, version: str = "v1", **changes: Any) -> None:
    """Give the model's version a cache, and promote it; returns when admission knows."""
    await ensure(site.kafka, model_topics(site.model, version, ("interactive",), 2, 60_000))
    settings: dict[str, Any] = {"cache_ttl_ms": 60_000, **changes}
    registered = ModelVersionRegistered(
        site.model, version, "scripted", "", CONTEXT, tokenizer="bytes", partitions=2, **settings
    )
    for event in (registered, ModelPromoted(site.model, version)):
        await site.producer.send_and_wait(REGISTRY, event, key=site.model)
    async with asyncio.timeout(WAIT_S):
        while True:
            rid = await site.ask(new_id(), sampling=GREEDY)
            admitted = await site.of(LIFECYCLE, InferenceAdmitted, rid)
            if any(decision.check == "cache" for decision in admitted.decisions) and admitted.version == version:
                return


@pytest.fixture
async def site(kafka: KafkaSettings) -> AsyncIterator[Site]:
    """A tenant, and a model that has a response cache."""
    async with open_site(kafka) as found:
        await register(found)
        yield found


def generation(
    work: InferenceScheduled, text: str = TEXT
) -> tuple[GenerationStarted, TokensGenerated, InferenceCompleted]:
    """What a worker tells of some work."""
    where = (work.request_id, work.tenant, work.model, work.version, work.tier)
    ids = tuple(text.encode())
    usage = Usage(len(work.prompt_token_ids), len(ids))
    return (
        GenerationStarted(*where, ATTEMPT, (0,), usage.prompt_tokens, "w", cache_key=work.cache_key),
        TokensGenerated(work.request_id, 0, ATTEMPT, 0, ids, text),
        InferenceCompleted(*where, ATTEMPT, (ChoiceEnd(0, len(ids), "stop"),), usage, Timings(), "w"),
    )


async def generate(site: Site, work: InferenceScheduled, text: str = TEXT) -> None:
    """Be the worker."""
    await site.tokens(*generation(work, text), topic=work.reply.topic, partition=work.reply.partition)


async def verdict(site: Site, rid: str) -> str:
    """What the cache had to do with an admitted request."""
    admitted = await site.of(LIFECYCLE, InferenceAdmitted, rid)
    (outcome,) = [decision.outcome for decision in admitted.decisions if decision.check == "cache"]
    assert admitted.cached is (outcome == "hit")
    return outcome


async def fill(site: Site, prompt: str) -> str:
    """Ask and be answered by a worker until the cache has it (it may not follow `answers` yet): the first id that was answered."""
    first = ""
    async with asyncio.timeout(WAIT_S):
        while await verdict(site, rid := await site.ask(prompt, sampling=GREEDY)) != "hit":
            work = await site.of(site.work, InferenceScheduled, rid)
            await generate(site, work)
            first = first or rid
            await asyncio.sleep(0.3)
    return first


async def until(site: Site, prompt: str, outcome: str, **how: Any) -> str:
    """Ask until the cache says so: a Redis that takes longer than its time, as on a busy machine, costs a hit. The last request's id."""
    async with asyncio.timeout(WAIT_S):
        while await verdict(site, rid := await site.ask(prompt, sampling=GREEDY, **how)) != outcome:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return rid


def stream_of(site: Site, topic: str, rid: str) -> list[tuple[ConsumerRecord, Any]]:
    return [(record, event) for record, event in site.seen.get(topic, ()) if getattr(event, "request_id", "") == rid]


async def test_a_hit_is_told_as_one_whole_stream_and_costs_no_work(site: Site) -> None:
    first = await fill(site, "once")
    whole = await site.of(ANSWERS, InferenceAnswered, first)
    record = site.record_of(ANSWERS, whole)
    assert whole.cache_key and (CACHE_HEADER, whole.cache_key.encode()) in record.headers
    rid = await until(site, "once", "hit", stream=False)
    again = await site.of(ANSWERS, InferenceAnswered, rid)
    assert again == replace(whole, request_id=rid, cache_key="")
    assert CACHE_HEADER not in dict(site.record_of(ANSWERS, again).headers)
    await site.of(TOKENS, InferenceCompleted, rid)
    told = stream_of(site, TOKENS, rid)
    offsets = [record.offset for record, _ in told]
    assert offsets == list(range(offsets[0], offsets[0] + len(told)))
    assert [type(event).__name__ for _, event in told] == [
        "GenerationTakenOver", "GenerationStarted", *["TokensGenerated"] * 3, "InferenceCompleted",
    ]  # fmt: skip
    begun = told[1][1]
    assert begun.cache_age_ms is not None and 0 <= begun.cache_age_ms < 60_000
    assert "".join(event.text for _, event in told if isinstance(event, TokensGenerated)) == TEXT
    assert (await site.of(LIFECYCLE, InferenceStarted, rid)).worker_id == "cache"
    ended = await site.of(LIFECYCLE, InferenceCompleted, rid)
    assert ended.usage == Usage(len("once"), len(TEXT))
    assert await site.all(site.work, InferenceScheduled, lambda work: work.request_id == rid) == []


async def test_a_direct_producer_has_it_in_json(site: Site) -> None:
    await fill(site, "direct")
    reply = Reply(f"tokens.{site.tenant}", 0, "json")
    record: dict[str, Any] = {
        "type": "InferenceRequested",
        "request_id": "",
        "model": site.model,
        "prompt": "direct",
        "sampling": {"temperature": 0, "max_tokens": 50},
    }
    async with asyncio.timeout(WAIT_S):
        while True:
            record["request_id"] = rid = new_id()
            await site.send(json.dumps(record).encode(), grant=site.grant(reply))
            if await verdict(site, rid) == "hit":
                break
    await site.of(reply.topic, InferenceCompleted, rid)
    told = stream_of(site, reply.topic, rid)
    assert all(record.value.startswith(b"{") for record, _ in told)
    assert "".join(event.text for _, event in told if isinstance(event, TokensGenerated)) == TEXT
    refused = {**record, "request_id": new_id(), "cache_control": "max-age=soon"}
    await site.send(json.dumps(refused).encode(), grant=site.grant(reply))
    rejected = await site.of(reply.topic, InferenceRejected, refused["request_id"])
    assert (rejected.reason, rejected.param) == ("invalid_request", "cache_control")


async def test_pairs_that_differ_are_misses(site: Site) -> None:
    await fill(site, "pair")
    for changes in (
        {"seed": 1}, {"max_tokens": 49}, {"top_k": 3}, {"stop": ("x",)}, {"logprobs": 0}, {"n": 2}, {"min_tokens": 1},
    ):  # fmt: skip
        assert await verdict(site, await site.ask("pair", sampling=replace(GREEDY, **changes))) == "miss"
    assert await verdict(site, await site.ask("pair", sampling=replace(GREEDY, temperature=0.1))) == "passed over"
    await until(site, "pair", "hit")


async def test_what_the_caller_says_is_heeded(site: Site) -> None:
    await fill(site, "said")
    for control in ("no-cache", "max-age=0"):
        assert await verdict(site, await site.ask("said", sampling=GREEDY, cache_control=control)) == "miss"
    for control in ("max-age=600", "no-store"):
        await until(site, "said", "hit", cache_control=control)
    rid = await site.ask("unkept", sampling=GREEDY, cache_control="no-store")
    work = await site.of(site.work, InferenceScheduled, rid)
    assert (work.cache_key, work.shared) == ("", False)


async def test_equal_work_goes_to_one_partition(site: Site) -> None:
    asked = [await site.ask("beside", sampling=GREEDY) for _ in range(8)]
    works = [await site.of(site.work, InferenceScheduled, rid) for rid in asked]
    assert len({work.cache_key for work in works}) == 1 and all(work.shared for work in works)
    # No worker is ready here, so places go by the id: `beside` alone draws nothing to a partition that nobody reads.
    assert {site.record_of(site.work, work).partition for work in works} <= {0, 1}


async def test_an_answer_grows_old(site: Site) -> None:
    await register(site, cache_ttl_ms=1_500)
    await fill(site, "old")
    await until(site, "old", "miss")


async def test_a_promoted_version_finds_nothing_of_its_predecessor(site: Site) -> None:
    await fill(site, "promoted")
    await register(site, "v2")
    assert await verdict(site, await site.ask("promoted", sampling=GREEDY)) == "miss"


async def test_a_failed_answer_is_not_kept(site: Site) -> None:
    rid = await site.ask("fails", sampling=GREEDY)
    work = await site.of(site.work, InferenceScheduled, rid)
    where = (rid, work.tenant, work.model, work.version, work.tier)
    begun = GenerationStarted(*where, ATTEMPT, (0,), 5, "w", cache_key=work.cache_key)
    await site.tokens(
        begun, InferenceCompleted(*where, ATTEMPT, (ChoiceEnd(0, 9, "stop"),), Usage(5, 9), Timings(), "w")
    )
    answer = await site.of(ANSWERS, InferenceAnswered, rid)
    assert (answer.error_reason, answer.cache_key) == ("inconsistent_stream", "")
    await fill(site, "later")
    assert await verdict(site, await site.ask("fails", sampling=GREEDY)) == "miss"


async def test_a_cancelled_answer_is_not_kept_whatever_it_had_made(site: Site) -> None:
    rid = await site.ask("cancelled", sampling=GREEDY)
    work = await site.of(site.work, InferenceScheduled, rid)
    begun, made, completed = generation(work)
    await site.tokens(begun, made)
    await site.send(InferenceCancelled(rid))
    assert (await site.of(TOKENS, InferenceFailed, rid)).reason == "cancelled"
    await site.tokens(completed)  # by a worker that hasn't heard of it
    answer = await site.of(ANSWERS, InferenceAnswered, rid)
    assert (answer.error_reason, answer.cache_key, answer.choices[0].text) == ("cancelled", "", TEXT)
    assert CACHE_HEADER not in dict(site.record_of(ANSWERS, answer).headers)
    await fill(site, "after it was cancelled")
    assert await verdict(site, await site.ask("cancelled", sampling=GREEDY)) == "miss"
    assert len(await site.all(ANSWERS, InferenceAnswered, lambda told: told.request_id == rid)) == 1


async def test_by_setting_a_hit_costs_its_tokens(site: Site) -> None:
    await register(site, cache_hit_cost="tokens")
    await fill(site, "priced")
    await limit(site, Quota("interactive", tokens_per_day=PLENTY))
    first, left_then = await paid_hit(site, "priced")
    _, left_now = await paid_hit(site, "priced")
    told = await site.all(LIFECYCLE, InferenceAdmitted, lambda event: event.tenant == site.tenant)
    assert left_then - left_now == sum(event.reserved_tokens for event in told[told.index(first) + 1 :])
    await limit(site, Quota("interactive", tokens_per_day=PLENTY - left_now + 1))
    refusal = await site.of(LIFECYCLE, InferenceRejected, await site.ask("priced", sampling=GREEDY))
    assert refusal.reason == "rate_limited"


async def paid_hit(site: Site, prompt: str) -> tuple[InferenceAdmitted, int]:
    """A hit that cost what its answer did, and the tokens that its tenant has left; returns once admission has heard that it ended."""
    rid = await until(site, prompt, "hit")
    admitted = await site.of(LIFECYCLE, InferenceAdmitted, rid)
    assert admitted.reserved_tokens == len(prompt) + len(TEXT)
    begun = await site.of(TOKENS, GenerationStarted, rid)
    assert begun.rates is not None and begun.rates.tokens is not None
    await site.of(LIFECYCLE, InferenceCompleted, rid)
    await asyncio.sleep(0.3)
    return admitted, begun.rates.tokens.remaining


async def test_the_cache_is_measured(site: Site, admission: Agent) -> None:
    await fill(site, "measured")
    found = admission.metrics()
    assert f'headrace_cache_lookups_total{{model="{site.model}",outcome="hit"}}' in found
    assert f'headrace_cache_lookups_total{{model="{site.model}",outcome="miss"}}' in found
    kept = float(found.split(f'headrace_cache_bytes{{model="{site.model}"}} ')[1].split("\n")[0])
    assert len(TEXT) < kept < 10_000


async def test_without_redis_everything_is_answered(site: Site, redis: RedisServer | None) -> None:
    if redis is None:
        pytest.skip("it is about Redis")
    await fill(site, "away")
    redis.kill()
    try:
        for _ in range(5):
            rid = await site.ask("away", sampling=GREEDY)
            assert await verdict(site, rid) == "miss"
            await site.of(site.work, InferenceScheduled, rid)
    finally:
        redis.start()
    await asyncio.sleep(1.1)
    await fill(site, "back")
