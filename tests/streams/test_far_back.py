"""A running admission of the batch tier parks what is far back, whatever it is, and takes it up again in its order."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from infra.settings import KafkaSettings
from schemas.codec import encode, encode_json
from schemas.events import (
    Attempt,
    InferenceAdmitted,
    InferenceCancelled,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    InferenceStarted,
    ModelVersionRegistered,
    PayloadStored,
    Position,
)
from schemas.payloads import key_of
from schemas.topics import BATCH, LIFECYCLE, REGISTRY, TOKENS
from streams.turnstile import HELD_OF_LANE_MAX
from tests.streams.site import CONTEXT, Agent, Site, new_id, open_site

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]
ALONE = 96
"""Three quarters of two windows of 64: what a tenant that is alone may have before workers."""
PARKED, NEARLY = 20, 16
"""So many that are let in at one time may be told in another order."""
SHORT_MS = 2_000
WAIT_S = 30.0
PARKED_LINE = re.compile(f'headrace_parked{{tier="{BATCH}"}} ([0-9.]+)')


@pytest.fixture(scope="module")
def batch(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running admission of the batch tier."""
    agent = Agent("admission", kafka, tmp_path_factory.mktemp("batch"), HEADRACE_ADMISSION_TIER=BATCH)
    agent.start()
    yield agent
    assert agent.stop() == 0, agent.last_words()


@pytest.fixture
async def narrow(kafka: KafkaSettings) -> AsyncIterator[Site]:
    """A site of that tier whose windows are small."""
    async with open_site(kafka, BATCH) as site:
        version = ModelVersionRegistered(
            site.model, "v1", "scripted", "", CONTEXT, tokenizer="bytes", partitions=2, slots=8
        )
        await site.producer.send_and_wait(REGISTRY, version, key=site.model)
        yield site


async def begin(site: Site, rid: str) -> None:
    """A worker is told to have begun it, as soon as it is let in."""
    admitted = await site.of(LIFECYCLE, InferenceAdmitted, rid)
    started = InferenceStarted(
        rid, site.tenant, site.model, "v1", BATCH, Attempt(1, 1), "w", 0.0, Position(TOKENS, 3, 0)
    )
    await site.producer.send_and_wait(LIFECYCLE, started, key=site.tenant, partition=admitted.source.partition)


async def parked(agent: Agent, count: int) -> None:
    """Returns when so many are."""
    end_s = time.monotonic() + WAIT_S
    while (found := PARKED_LINE.search(agent.metrics())) is None or float(found[1]) != count:
        assert time.monotonic() < end_s, found
        await asyncio.sleep(0.2)


async def test_what_is_parked_is_let_in_in_its_order_read_from_wherever_it_is(batch: Agent, narrow: Site) -> None:
    payloads = Payloads(FolderStore(batch.objects))
    ahead = [await narrow.ask() for _ in range(ALONE + HELD_OF_LANE_MAX)]
    behind = [await narrow.ask() for _ in range(PARKED)]
    large = []
    for told in (True, False):  # of one the log says for which model it is
        request = InferenceRequested(new_id(), narrow.model, prompt="large")
        body = encode_json(request)
        name, digest = request.request_id, hashlib.sha256(body).hexdigest()
        reference = PayloadStored(name, narrow.tenant, "InferenceRequested", digest, len(body))
        await payloads.store.put(key_of(reference), body)
        outline = encode(replace(request, prompt=None)) if told else None
        await narrow.send(replace(reference, outline=outline))
        large.append(name)
    unwanted = await narrow.ask()
    await parked(batch, PARKED + len(large) + 1)
    await narrow.send(InferenceCancelled(unwanted))
    assert (await narrow.of(TOKENS, InferenceFailed, unwanted)).reason == "cancelled"
    assert (await narrow.of(LIFECYCLE, InferenceRejected, unwanted)).reason == "cancelled"
    late = await narrow.ask(timeout_ms=SHORT_MS)
    assert (await narrow.of(TOKENS, InferenceRejected, late)).reason == "deadline_exceeded"
    for rid in [*ahead, *behind, *large]:
        await begin(narrow, rid)
    await parked(batch, 0)
    admitted = await narrow.all(LIFECYCLE, InferenceAdmitted, lambda event: event.tenant == narrow.tenant)
    order = [event.request_id for event in admitted]
    assert sorted(order) == sorted([*ahead, *behind, *large])
    assert max(map(order.index, ahead[:-NEARLY])) < min(map(order.index, behind))
    await payloads.close()
