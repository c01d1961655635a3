"""Requests and answers that are in the object store, on running processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from infra.log import EventDecoder, EventProducer
from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from schemas.codec import encode, encode_json
from schemas.events import (
    InferenceAdmitted,
    InferenceAnswered,
    InferenceCancelled,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    PayloadStored,
    TokenLogprob,
    TokensGenerated,
)
from schemas.payloads import key_of
from schemas.topics import ANSWERS, INLINE_MAX_BYTES, LIFECYCLE, REQUEST_MAX_BYTES, TOKENS
from tests.streams.site import Agent, Site, new_id
from tests.streams.test_admission import home
from tests.streams.test_endings import completed, started, tokens

pytestmark = pytest.mark.kafka
LARGE = "x" * (INLINE_MAX_BYTES + 1)


@pytest.fixture
async def payloads(admission: Agent) -> AsyncIterator[Payloads]:
    found = Payloads(FolderStore(admission.objects))
    yield found
    await found.close()


async def put(payloads: Payloads, tenant: str, body: bytes, rid: str) -> PayloadStored:
    """What a direct producer does."""
    reference = PayloadStored(rid, tenant, "InferenceRequested", hashlib.sha256(body).hexdigest(), len(body))
    await payloads.store.put(key_of(reference), body)
    return reference


async def stored(site: Site, payloads: Payloads, prompt: str = "hello", rid: str | None = None) -> PayloadStored:
    request = InferenceRequested(rid or new_id(), site.model, prompt=prompt)
    return await put(payloads, site.tenant, encode_json(request), request.request_id)


async def refused(site: Site, reference: PayloadStored, **how: Any) -> InferenceRejected:
    await site.send(reference, **how)
    found = await site.of(TOKENS, InferenceRejected, reference.request_id)
    assert await site.of(LIFECYCLE, InferenceRejected, reference.request_id) == found
    return found


async def assert_served(site: Site) -> None:
    rid = await site.ask()
    await site.of(site.work, InferenceScheduled, rid)


@pytest.mark.parametrize("encoding", ["avro", "json"])
async def test_a_request_by_reference_is_admitted(site: Site, payloads: Payloads, encoding: str) -> None:
    reference = await stored(site, payloads)
    await site.send(reference, encoding=encoding)
    scheduled = await site.of(site.work, InferenceScheduled, reference.request_id)
    assert bytes(scheduled.prompt_token_ids) == b"hello"


async def test_what_headrace_stores_itself_is_read(site: Site, payloads: Payloads) -> None:
    producer = EventProducer(site.kafka, "test", payloads)
    await producer.start()
    for large in ({"prompt": LARGE}, {"prompt_token_ids": (97,) * 200_000}):
        request = InferenceRequested(new_id(), site.model, **large)
        value = await producer.encoded(request, owner=site.tenant)
        assert len(value) < 1_000
        await site.send(value)
        found = await site.of(TOKENS, InferenceRejected, request.request_id)
        assert found.reason == "context_length_exceeded"  # it was read to its end
    await producer.stop()


async def test_it_is_sent_on_to_its_partition(site: Site, payloads: Payloads) -> None:
    reference = await stored(site, payloads)
    await site.send(reference, partition=(home(site.tenant) + 1) % 4)
    await site.of(site.work, InferenceScheduled, reference.request_id)


async def test_another_tenants_object_is_not_read(site: Site, payloads: Payloads) -> None:
    """Neither by a reference that says whose it is nor by one that says it is the caller's own."""
    rid = new_id()
    request = encode_json(InferenceRequested(rid, site.model, prompt="secret"))
    reference = await put(payloads, "somebody", request, rid)
    assert (await refused(site, reference)).reason == "permission_denied"
    own = replace(reference, tenant=site.tenant, request_id=new_id())
    assert (await refused(site, own)).reason == "payload_lost"
    await assert_served(site)


@pytest.mark.parametrize(
    ("changed", "reason", "param"),
    [
        ({"size_bytes": REQUEST_MAX_BYTES + 100_000}, "payload_too_large", "size_bytes"),
        ({"size_bytes": -1}, "invalid_request", "size_bytes"),
        ({"digest": "nothing"}, "invalid_request", "digest"),
        ({"event": "InferenceScheduled"}, "invalid_request", "event"),
        ({"digest": "0" * 64}, "payload_lost", None),
        ({"size_bytes": 50}, "payload_lost", None),
        ({"outline": b"junk"}, "invalid_request", None),
        ({"outline": encode(InferenceCancelled(new_id()))}, "invalid_request", "outline"),
    ],
)
async def test_a_reference_that_leads_nowhere_is_refused(
    site: Site, payloads: Payloads, changed: dict[str, Any], reason: str, param: str | None
) -> None:
    reference = replace(await stored(site, payloads), **changed)
    found = await refused(site, reference)
    assert (found.reason, found.param) == (reason, param)
    await assert_served(site)


@pytest.mark.parametrize(
    "body_of",
    [
        lambda rid: b"junk",
        lambda rid: b"\xc3\x01",
        lambda rid: encode_json(InferenceRequested(new_id(), "m", prompt="x")),
        lambda rid: encode(InferenceCancelled(rid, "t")),
        lambda rid: encode(PayloadStored(rid, "t", "InferenceRequested", "0" * 64, 5)),
        lambda rid: json.dumps({"type": "InferenceRequested", "request_id": rid, "model": 5}).encode(),
    ],
)
async def test_an_object_that_holds_no_such_request_is_refused(
    site: Site, payloads: Payloads, body_of: Callable[[str], bytes]
) -> None:
    rid = new_id()
    found = await refused(site, await put(payloads, site.tenant, body_of(rid), rid))
    assert found.reason == "invalid_request"
    await assert_served(site)


async def test_a_request_is_measured_when_it_is_read(site: Site, payloads: Payloads) -> None:
    for beyond, reason in ((0, "context_length_exceeded"), (1, "payload_too_large")):
        reference = await stored(site, payloads, "x" * (REQUEST_MAX_BYTES + beyond))
        await site.send(reference)
        assert (await site.of(TOKENS, InferenceRejected, reference.request_id)).reason == reason


async def test_a_grant_is_judged_first(site: Site, payloads: Payloads) -> None:
    gone = replace(await stored(site, payloads), digest="0" * 64)
    assert (await refused(site, gone, grant=site.grant(valid_ms=-1_000))).reason == "grant_expired"
    sent = await site.send(gone, grant=None)
    assert (await site.buried(sent)).reason == "invalid_grant"


async def test_a_bit_that_flipped_is_never_served(site: Site, payloads: Payloads, admission: Agent) -> None:
    reference = await stored(site, payloads)
    path = admission.objects / key_of(reference)
    body = path.read_bytes()
    path.write_bytes(body[:-10] + bytes((body[-10] ^ 1,)) + body[-9:])
    assert (await refused(site, reference)).reason == "payload_lost"
    await assert_served(site)


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_an_answer_larger_than_a_record_is_stored(site: Site, endings: Agent) -> None:
    rid, count = new_id(), 40
    scored = TokenLogprob(120, b"x" * 2_000, -0.5)
    await site.tokens(started(site, rid))
    for first in range(0, count * 20, 20):
        await site.tokens(replace(tokens(rid, first, "x" * 20), logprobs=(scored,) * 20))
    await site.tokens(completed(site, rid, count * 20))
    reference = await site.of(ANSWERS, PayloadStored, rid)
    assert (reference.tenant, reference.event) == (site.tenant, "InferenceAnswered")
    payloads = Payloads(FolderStore(endings.objects))
    answered = await EventDecoder(site.kafka, payloads).decode(encode(reference))
    assert isinstance(answered, InferenceAnswered)
    assert (answered.choices[0].text, answered.error_reason) == ("x" * count * 20, None)
    assert answered.choices[0].logprobs == (scored,) * count * 20
    await payloads.close()


async def test_a_part_of_an_answer_that_is_lost_ends_it(site: Site, endings: Agent) -> None:
    """Chunk or ending: whatever was lost, the request is ended, and the next one is told as ever."""
    payloads = Payloads(FolderStore(endings.objects))
    producer = EventProducer(site.kafka, "test", payloads)
    await producer.start()
    for harmed in (TokensGenerated, None):
        rid = new_id()
        await site.tokens(started(site, rid))
        chunk = tokens(rid, 0, "x") if harmed is None else replace(tokens(rid, 0, "x"), text=LARGE)
        ending = completed(site, rid, 1)
        if harmed is None:
            ending = replace(ending, choices=(replace(ending.choices[0], text=LARGE),))
        values = [await producer.encoded(event, owner=site.tenant) for event in (chunk, ending)]
        async for found in payloads.store.listed("payloads"):
            await payloads.store.delete(found.key)
        for value in values:
            await (await producer.send_raw(TOKENS, value, partition=3, key=rid.encode()))
        failed = await site.of(LIFECYCLE, InferenceFailed, rid)
        assert (failed.reason, failed.tenant, failed.model) == ("payload_lost", site.tenant, site.model)
        kept = await site.of(ANSWERS, InferenceAnswered, rid)
        assert kept.error_reason == "payload_lost"
    await producer.stop()
    await payloads.close()
    rid = new_id()
    await site.tokens(started(site, rid), tokens(rid, 0, "next"), completed(site, rid, 4))
    assert (await site.of(ANSWERS, InferenceAnswered, rid)).choices[0].text == "next"


async def test_a_cancel_waits_for_what_is_being_fetched(site: Site, payloads: Payloads) -> None:
    """Else the request would be let in after its end was told, and nobody would end it."""
    for _ in range(10):
        reference = await stored(site, payloads, "x" * 150)
        await site.send(reference)
        await site.send(InferenceCancelled(reference.request_id, site.tenant))
        rid = reference.request_id
        ended = await site.of(TOKENS, InferenceFailed, rid)
        assert ended.reason == "cancelled"
        admitted = await site.of(LIFECYCLE, InferenceAdmitted, rid)
        assert site.record_of(LIFECYCLE, admitted).timestamp <= site.record_of(TOKENS, ended).timestamp
