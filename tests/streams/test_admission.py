"""Admission as a process on a real broker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiokafka.partitioner import DefaultPartitioner

from infra.settings import KafkaSettings
from infra.tracing import new_traceparent, trace_id
from schemas.codec import encode
from schemas.events import (
    Attempt,
    GenerationReleased,
    InferenceAdmitted,
    InferenceCancelled,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    Message,
    RecordDeadLettered,
    Reply,
    Sampling,
)
from schemas.topics import CONTROL, DEAD_LETTERS, LIFECYCLE, TOKENS, requests_topic
from tests.streams.site import Agent, Site, new_id

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("admission")]
REQUESTS = requests_topic("interactive")
PARTITIONS = 4


def home(tenant: str) -> int:
    every = list(range(PARTITIONS))
    return int(DefaultPartitioner()(tenant.encode(), every, every))


async def is_alive(site: Site) -> None:
    """The next good record is served."""
    await site.of(site.work, InferenceScheduled, await site.ask())


async def test_a_request_becomes_work_and_a_record_of_it(site: Site) -> None:
    rid = await site.ask("hé", sampling=Sampling(max_tokens=7), stream=False)
    scheduled = await site.of(site.work, InferenceScheduled, rid)
    assert scheduled.prompt_token_ids == tuple("hé".encode())
    assert (scheduled.tenant, scheduled.model, scheduled.version, scheduled.stream) == (
        site.tenant,
        site.model,
        "v1",
        False,
    )
    assert scheduled.sampling.max_tokens == 7
    assert scheduled.cache_salt == "salt"
    admitted = await site.of(LIFECYCLE, InferenceAdmitted, rid)
    work, life = site.record_of(site.work, scheduled), site.record_of(LIFECYCLE, admitted)
    assert (admitted.work_topic, admitted.work_partition) == (work.topic, work.partition)
    assert work.key == rid.encode()
    assert life.key == site.tenant.encode() and life.partition == home(site.tenant)
    assert admitted.source == scheduled.source and admitted.source.topic == REQUESTS
    assert [decision.outcome for decision in admitted.decisions if decision.check == "route"] == ["v1"]


async def test_a_chat_in_json_for_a_direct_producer(site: Site) -> None:
    rid = new_id()
    record = {
        "type": "InferenceRequested",
        "request_id": rid,
        "model": site.model,
        "messages": [{"role": "user", "content": "hi"}],
    }
    reply = Reply(f"tokens.{site.tenant}", 0, "json")
    await site.send(json.dumps(record).encode(), grant=site.grant(reply))
    assert (await site.of(site.work, InferenceScheduled, rid)).reply == reply
    bad = {**record, "request_id": new_id(), "sampling": {"temperature": 9.0}}
    await site.send(json.dumps(bad).encode(), grant=site.grant(reply))
    rejected = await site.of(reply.topic, InferenceRejected, str(bad["request_id"]))
    assert rejected.param == "sampling.temperature"
    assert site.record_of(reply.topic, rejected).value[:1] == b"{"


async def test_the_trace_goes_on(site: Site) -> None:
    parent = new_traceparent()
    rid = await site.ask(send={"headers": (("traceparent", parent.encode()),)})
    scheduled = await site.of(site.work, InferenceScheduled, rid)
    headers = site.record_of(site.work, scheduled).headers
    assert trace_id(headers) == parent.split("-")[1]
    assert dict(headers)["traceparent"] != parent.encode()
    assert "grant" not in dict(headers)


@pytest.mark.parametrize(
    ("request_", "reason", "param"),
    [
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"model": "nothing-like-it"}, "model_not_found", "model"),
        ({"prompt": "x" * 201}, "context_length_exceeded", "prompt"),
        ({"sampling": Sampling(max_tokens=200)}, "context_length_exceeded", "prompt"),
        ({"sampling": Sampling(logit_bias={"99999999": 5.0})}, "invalid_request", "sampling.logit_bias.99999999"),
        ({"sampling": Sampling(stop_token_ids=(2147483647,))}, "invalid_request", "sampling.stop_token_ids[0]"),
        ({"timeout_ms": 0}, "invalid_request", "timeout_ms"),
    ],
)
async def test_a_refusal_reaches_the_caller_and_the_record(
    site: Site, request_: dict[str, object], reason: str, param: str
) -> None:
    rid = await site.ask(**request_)  # type: ignore[arg-type]
    told = await site.of(TOKENS, InferenceRejected, rid)
    assert (told.reason, told.param, told.tenant) == (reason, param, site.tenant)
    assert site.record_of(TOKENS, told).partition == 3
    assert await site.of(LIFECYCLE, InferenceRejected, rid) == told
    await is_alive(site)
    assert not await site.all(site.work, InferenceScheduled, lambda event: event.request_id == rid)


async def test_a_model_that_a_caller_made_up_is_no_label(site: Site, admission: Agent) -> None:
    refused = await site.ask(sampling=Sampling(temperature=9.0))
    made_up = await site.ask(model=f"made-up-{site.model}")
    for rid in (refused, made_up):
        await site.of(LIFECYCLE, InferenceRejected, rid)
    shown = await asyncio.to_thread(admission.metrics)
    assert f'model="{site.model}",outcome="invalid_request"' in shown
    assert 'model="",outcome="model_not_found"' in shown
    assert f"made-up-{site.model}" not in shown


async def test_a_grant_that_is_void(site: Site) -> None:
    for void, reason in (
        (site.grant(valid_ms=-60_000), "grant_expired"),
        (site.grant(tiers=("batch",)), "permission_denied"),
    ):
        rid = await site.ask(send={"grant": void})
        assert (await site.of(TOKENS, InferenceRejected, rid)).reason == reason
    for grant in (
        None,
        "nonsense",
        site.grant(secret="forged by somebody else, as long as it takes"),
        site.grant(Reply("tokens.other", 0)),
        site.grant(Reply(LIFECYCLE, 0)),
    ):
        sent = await site.send(InferenceRequested(new_id(), site.model, prompt="x"), grant=grant)
        letter = await site.buried(sent)
        assert "grant" not in letter.headers
    await is_alive(site)
    assert len(await site.all(site.work, InferenceScheduled)) == 1


def junk(site: Site) -> dict[str, bytes | None]:
    good = encode(InferenceRequested(new_id(), site.model, prompt="x"))
    return {
        "two bytes": b"\xff\x00",
        "null": None,
        "cut": good[:-1],
        "too long": good + b"\x00",
        "unknown fingerprint": b"\xc3\x01" + b"\x01" * 8 + good[10:],
        "not JSON": b"{",
        "unknown type": b'{"type":"Nonsense"}',
        "another event": encode(GenerationReleased("r", Attempt(1, 1), "w")),
    }


@pytest.mark.parametrize("with_grant", [True, False])
async def test_junk_is_put_aside_and_the_next_record_is_served(site: Site, with_grant: bool) -> None:
    for name, value in junk(site).items():
        sent = await site.send(value, grant="" if with_grant else None, partition=home(site.tenant))
        letter = await site.buried(sent)
        assert letter.value == value, name
        assert letter.topic == REQUESTS and letter.process == "admission"
        await is_alive(site)
    told = await site.all(TOKENS, InferenceRejected, lambda event: event.tenant == site.tenant)
    assert len(told) == (7 if with_grant else 0)  # an event of another kind tells nobody


async def test_a_json_request_with_a_fault_is_told_to_its_writer_alone(site: Site) -> None:
    rid = new_id()
    record = {"type": "InferenceRequested", "request_id": rid, "model": site.model, "prompt": "x", "tempratur": 1}
    sent = await site.send(json.dumps(record).encode())
    told = await site.of(TOKENS, InferenceRejected, rid)
    assert (told.reason, told.param) == ("invalid_request", "tempratur")
    assert told.source is not None and told.source.offset == sent.offset
    assert (await site.of(LIFECYCLE, InferenceRejected, rid)).model == site.model
    await is_alive(site)
    assert not await site.all(
        DEAD_LETTERS,
        RecordDeadLettered,
        lambda letter: (letter.partition, letter.offset) == (sent.partition, sent.offset),
    )


@pytest.mark.parametrize(
    ("fields", "param"), [(rb'"prompt":"\ud800"', "prompt"), (rb'"prompt":"x","\ud800":1', r"\ud800")]
)
async def test_an_unpaired_surrogate_is_refused(site: Site, fields: bytes, param: str) -> None:
    rid = new_id()
    await site.send(b'{"type":"InferenceRequested","request_id":"%s","model":"m",%s}' % (rid.encode(), fields))
    assert (await site.of(TOKENS, InferenceRejected, rid)).param == param


@pytest.mark.parametrize("key", [None, "somebody else"])
async def test_a_record_in_the_wrong_partition_is_sent_on(site: Site, key: str | None) -> None:
    wrong = (home(site.tenant) + 1) % PARTITIONS
    rid = await site.ask(send={"key": key, "partition": wrong})
    scheduled = await site.of(site.work, InferenceScheduled, rid)
    assert scheduled.source is not None and scheduled.source.partition == home(site.tenant)


async def test_a_record_is_sent_on_only_once(site: Site) -> None:
    wrong = (home(site.tenant) + 1) % PARTITIONS
    sent = await site.send(
        InferenceRequested(new_id(), site.model, prompt="x"), partition=wrong, headers=(("rekeyed", b"1"),)
    )
    await site.buried(sent)


async def test_a_null_key_in_the_right_partition_is_served(site: Site) -> None:
    rid = await site.ask(send={"key": None, "partition": home(site.tenant)})
    await site.of(site.work, InferenceScheduled, rid)


async def test_a_cancel_tells_the_caller_and_all_workers(site: Site) -> None:
    rid = await site.ask()
    await site.send(InferenceCancelled(rid, tenant="somebody else"))
    ending = await site.of(TOKENS, InferenceFailed, rid)
    assert (ending.reason, ending.tenant, ending.source, ending.attempt) == ("cancelled", site.tenant, "cancel", None)
    assert await site.of(CONTROL, InferenceCancelled, rid) == InferenceCancelled(rid, site.tenant)


async def test_a_long_prompt_holds_nobody_up(site: Site) -> None:
    """It is refused, after it was tokenised; a short one behind it in the same partition is served at once."""
    long = InferenceRequested(new_id(), site.model, messages=(Message("user", "x" * 700_000),))
    await site.send(long)
    rids = [await site.ask() for _ in range(20)]
    await asyncio.gather(*[site.of(site.work, InferenceScheduled, rid) for rid in rids[-1:]])
    assert (await site.of(TOKENS, InferenceRejected, long.request_id)).reason == "context_length_exceeded"


async def test_a_killed_admission_loses_nothing(site: Site, admission: Agent) -> None:
    """Requests written before, during and after: each is admitted at least once, and always in the same way."""
    rids = [await site.ask() for _ in range(30)]
    admission.kill()
    rids += [await site.ask() for _ in range(30)]
    admission.start()
    rids += [await site.ask() for _ in range(5)]
    for rid in rids:
        await site.of(site.work, InferenceScheduled, rid)
        await site.of(LIFECYCLE, InferenceAdmitted, rid)
    every = await site.all(site.work, InferenceScheduled)
    for rid in rids:
        repeats = {repr(event) for event in every if event.request_id == rid}
        assert len(repeats) == 1, "a repetition differs"


async def test_an_orderly_stop_repeats_nothing(site: Site, admission: Agent) -> None:
    before = [await site.ask() for _ in range(20)]
    for rid in before:
        await site.of(site.work, InferenceScheduled, rid)
    assert admission.stop() == 0, admission.last_words()
    admission.start()
    await is_alive(site)
    assert len(await site.all(site.work, InferenceScheduled)) == len(before) + 1


async def test_a_second_admission_comes_and_is_killed_and_nothing_is_lost(
    site: Site, kafka: KafkaSettings, tmp_path: Path
) -> None:
    """Partitions move twice while requests come to all of them (those in a foreign one are sent on)."""
    second = Agent("admission", kafka, tmp_path, HEADRACE_ADMISSION_SESSION_TIMEOUT_MS="6000")

    async def ask(count: int) -> list[str]:
        return [await site.ask(send={"partition": i % PARTITIONS}) for i in range(count)]

    rids = await ask(20)
    starting = asyncio.create_task(asyncio.to_thread(second.start))
    while not starting.done():
        rids += await ask(10)
        await asyncio.sleep(0.2)
    await starting
    rids += await ask(20)
    second.kill()
    rids += await ask(20)
    for rid in rids:
        await site.of(site.work, InferenceScheduled, rid)
        await site.of(LIFECYCLE, InferenceAdmitted, rid)
