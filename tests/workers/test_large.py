"""Work and answers that are too large for a record: fetched, stored, and ended with the reason where neither can be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from infra.log import EventDecoder, EventProducer
from infra.objects import DEFAULT_FOLDER
from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from infra.settings import KafkaSettings, ProcessSettings
from schemas.events import Attempt, GenerationStarted, InferenceCompleted, InferenceFailed, Sampling
from schemas.topics import TOKENS
from tests.workers.lane import PARTITIONS, Lane, open_lane

CONTEXT = 3_000_000
PAD = "x" * 800_000


@pytest.fixture
async def payloads(tmp_path: Path) -> AsyncIterator[Payloads]:
    found = Payloads(FolderStore(tmp_path / DEFAULT_FOLDER))
    yield found
    await found.close()


@pytest.fixture
async def lane(kafka: KafkaSettings, payloads: Payloads) -> AsyncIterator[Lane]:
    """One whose requests and answers may be in the object store."""
    async with open_lane(kafka, context_length=CONTEXT) as lane:
        lane.producer = EventProducer(kafka, "test", payloads)
        await lane.producer.start()
        lane._decoder = EventDecoder(kafka, payloads)
        try:
            yield lane
        finally:
            await lane.producer.stop()


def large(said: str) -> dict[str, Any]:
    return {"tokens": list(said), "pad": PAD}


async def lose(payloads: Payloads) -> None:
    async for found in payloads.store.listed("payloads"):
        await payloads.store.delete(found.key)


async def test_large_work_is_answered_among_small(lane: Lane, tmp_path: Path) -> None:
    rids = [await lane.ask(large(f"large {i}") if i % 3 == 0 else f"small {i}") for i in range(9)]
    async with lane.worker(data_dir=tmp_path):
        reads = await lane.until_closed(*rids)
    assert [read.text for read in reads] == [f"{'large' if i % 3 == 0 else 'small'} {i}" for i in range(9)]
    assert isinstance(reads[0].ending, InferenceCompleted)
    assert reads[0].ending.usage.prompt_tokens > len(PAD)


@pytest.mark.parametrize("begun", [False, True])
async def test_work_that_is_lost_is_ended_and_the_next_is_served(
    lane: Lane, payloads: Payloads, tmp_path: Path, begun: bool
) -> None:
    """Also if somebody had begun it, who can't be taken over now."""
    lost = await lane.ask(large("lost"))
    await lose(payloads)
    if begun:
        model, version = lane.version.model, lane.version.version
        started = GenerationStarted(lost, "acme", model, version, "interactive", Attempt(1, 1), (0,), 3, "gone")
        await lane.producer.send_and_wait(TOKENS, started, partition=sum(lost.encode()) % PARTITIONS)
    after = await lane.ask("after")
    async with lane.worker(data_dir=tmp_path):
        failed, read = await lane.until_closed(lost, after)
    assert isinstance(failed.ending, InferenceFailed)
    assert failed.ending.reason == "payload_lost"
    assert read.text == "after"


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> Sampling:
    """Records take little, so that one chunk with log-probabilities is too large for them; how to ask for such."""
    monkeypatch.setattr("infra.log.INLINE_MAX_BYTES", 10_000)
    return Sampling(max_tokens=200, logprobs=20)


async def test_a_chunk_larger_than_a_record_is_stored(
    lane: Lane, payloads: Payloads, tmp_path: Path, small_records: Sampling
) -> None:
    async with lane.worker(data_dir=tmp_path):
        rid = await lane.ask({"tokens": ["y" * 64]}, sampling=small_records)
        (read,) = await lane.until_closed(rid)
    assert read.text == "y" * 64
    assert [found async for found in payloads.store.listed("payloads/acme")]


async def test_an_answer_that_cannot_be_stored_fails_and_the_next_is_served(
    lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_records: Sampling
) -> None:
    def impatient(settings: ProcessSettings) -> Payloads:
        return Payloads(FolderStore(settings.data_dir / DEFAULT_FOLDER), patience_s=0.2)

    monkeypatch.setattr(Payloads, "of", impatient)
    away = tmp_path / "away"
    away.mkdir()
    (away / DEFAULT_FOLDER).write_bytes(b"no folder")
    async with lane.worker(data_dir=away):
        rid = await lane.ask({"tokens": ["ok", "y" * 64], "token_ms": 100}, sampling=small_records)
        (failed,) = await lane.until_closed(rid)
        (read,) = await lane.until_closed(await lane.ask("after"))
    assert isinstance(failed.ending, InferenceFailed)
    assert failed.ending.reason == "unavailable"
    assert failed.ending.totals == failed.state.accepted
    assert read.text == "after"
