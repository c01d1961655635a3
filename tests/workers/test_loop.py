"""A worker with the scripted engine on a real broker."""

from __future__ import annotations

from infra.settings import KafkaSettings
from schemas.events import InferenceCompleted, Sampling
from tests.workers.lane import open_lane


async def test_an_answer_is_streamed_and_ended(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        rid = await lane.ask("Grüße")
        (read,) = await lane.until_closed(rid)
    assert read.text == "Grüße"
    assert isinstance(read.ending, InferenceCompleted)
    assert read.ending.usage.prompt_tokens == 7
    assert read.ending.usage.completion_tokens == 8  # the end counts
    assert read.ending.choices[0].finish_reason == "stop"
    assert all("traceparent" in headers for headers in read.headers)


async def test_many_requests_over_partitions_and_tiers(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, partitions=3, slots=8) as lane:
        rids = [await lane.ask(f"question {i}", partition=i % 3, tier=("interactive", "batch")[i % 2]) for i in range(60)]
        async with lane.worker():
            reads = await lane.until_closed(*rids)
            more = [await lane.ask({"tokens": [str(i)], "repeat": 50}, partition=i % 3, max_tokens=20) for i in range(100)]
            later = await lane.until_closed(*more)
    assert [read.text for read in reads] == [f"question {i}" for i in range(60)]
    assert [read.text for read in later] == [(str(i) * 50)[:20] for i in range(100)]
    assert {read.ending.choices[0].finish_reason for read in later if isinstance(read.ending, InferenceCompleted)} == {"length"}


async def test_more_choices_than_slots(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=2) as lane, lane.worker():
        rids = [await lane.ask(f"n{i}", sampling=Sampling(max_tokens=50, n=5)) for i in range(4)]
        reads = await lane.until_closed(*rids)
    for i, read in enumerate(reads):
        assert read.texts == dict.fromkeys(range(5), f"n{i}")
