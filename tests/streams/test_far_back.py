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
    InferenceScheduled,
    InferenceStarted,
    PayloadStored,
    Position,
)
from schemas.payloads import key_of
from schemas.topics import BATCH, LIFECYCLE, REGISTRY, TOKENS
from streams.turnstile import HELD_OF_LANE_MAX
from tests.streams.site import Agent, Site, new_id, open_site

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]
SLOTS, ALONE = 8, 96
"""With so few slots windows have 64 records. Three quarters of two: what a tenant that is alone may have before workers."""
PARKED, NEARLY = 20, 16
"""So many that are let in at one time may be told in another order."""
FEW = 3
SHORT_MS = 2_000
READ_S = 0.5
"""Within that admission surely has what is told of models."""
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
    async with open_site(kafka, BATCH, slots=SLOTS) as site:
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


async def by_reference(agent: Agent, site: Site, rid: str = "", *, told: bool = True) -> str:
    """A request that is in the object store: its id. `told`: the log says for which model it is."""
    request = InferenceRequested(rid or new_id(), site.model, prompt="large")
    body = encode_json(request)
    name, digest = request.request_id, hashlib.sha256(body).hexdigest()
    reference = PayloadStored(name, site.tenant, "InferenceRequested", digest, len(body))
    payloads = Payloads(FolderStore(agent.objects))
    await payloads.store.put(key_of(reference), body)
    await payloads.close()
    outline = encode(replace(request, prompt=None)) if told else None
    await site.send(replace(reference, outline=outline))
    return name


async def test_what_is_parked_is_let_in_in_its_order_read_from_wherever_it_is(batch: Agent, narrow: Site) -> None:
    ahead = [await narrow.ask() for _ in range(ALONE + HELD_OF_LANE_MAX)]
    behind = [await narrow.ask() for _ in range(PARKED)]
    large = [await by_reference(batch, narrow, told=told) for told in (True, False)]
    unwanted = await narrow.ask()
    await parked(batch, PARKED + len(large) + 1)
    await narrow.send(InferenceCancelled(unwanted))
    assert (await narrow.of(TOKENS, InferenceFailed, unwanted)).reason == "cancelled"
    assert (await narrow.of(LIFECYCLE, InferenceRejected, unwanted)).reason == "cancelled"
    late = await narrow.ask(timeout_ms=SHORT_MS)
    narrow.heard_in_time(await narrow.of(TOKENS, InferenceRejected, late), SHORT_MS)
    for rid in [*ahead, *behind, *large]:
        await begin(narrow, rid)
    await parked(batch, 0)
    admitted = await narrow.all(LIFECYCLE, InferenceAdmitted, lambda event: event.tenant == narrow.tenant)
    order = [event.request_id for event in admitted]
    assert sorted(order) == sorted([*ahead, *behind, *large])
    assert max(map(order.index, ahead[:-NEARLY])) < min(map(order.index, behind))


@pytest.mark.parametrize("depth", [FEW, ALONE + FEW, ALONE + HELD_OF_LANE_MAX + FEW])
async def test_a_full_queue_takes_no_more_and_who_has_a_place_in_it_keeps_it(
    batch: Agent, kafka: KafkaSettings, depth: int
) -> None:
    """Wherever the last of them are: before workers, held back, or parked; the very last is still fetched when others come."""
    async with open_site(kafka, BATCH, slots=SLOTS, max_queue_depth={BATCH: depth}) as site:
        placed = [await site.ask() for _ in range(min(depth - 1, ALONE))]
        for rid in placed:
            await site.of(LIFECYCLE, InferenceAdmitted, rid)
        placed += [await site.ask() for _ in range(depth - len(placed) - 1)]
        placed.append(await by_reference(batch, site))
        await by_reference(batch, site, placed[-1])  # a refusal would end the first's stream
        for rid in (await site.ask(), await by_reference(batch, site), await site.ask()):
            refusal = await site.of(TOKENS, InferenceRejected, rid)
            assert (refusal.reason, refusal.param) == ("overloaded", "model")
            assert f"no more than {depth} may" in refusal.message
        shallower = site.registered(max_queue_depth={BATCH: 1})
        await site.producer.send_and_wait(REGISTRY, shallower, key=site.model)
        await asyncio.sleep(READ_S)
        for rid in placed:
            await begin(site, rid)
        for rid in placed:
            await site.of(site.work, InferenceScheduled, rid)
