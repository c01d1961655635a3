"""A worker with the scripted engine on a real broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition

from infra.kafka import make_consumer
from infra.read import read_to_end
from infra.settings import KafkaSettings
from schemas.codec import Codec, encode
from schemas.events import (
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceScheduled,
    RecordDeadLettered,
    Reply,
    Sampling,
    TokensGenerated,
)
from schemas.topics import DEAD_LETTERS, TOKENS, WORKERS
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
        rids = [
            await lane.ask(f"question {i}", partition=i % 3, tier=("interactive", "batch")[i % 2]) for i in range(60)
        ]
        async with lane.worker():
            reads = await lane.until_closed(*rids)
            more = [
                await lane.ask({"tokens": [str(i)], "repeat": 50}, partition=i % 3, max_tokens=20) for i in range(100)
            ]
            later = await lane.until_closed(*more)
    assert [read.text for read in reads] == [f"question {i}" for i in range(60)]
    assert [read.text for read in later] == [(str(i) * 50)[:20] for i in range(100)]
    assert {read.ending.choices[0].finish_reason for read in later if isinstance(read.ending, InferenceCompleted)} == {
        "length"
    }


async def test_more_choices_than_slots(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=2) as lane, lane.worker():
        rids = [await lane.ask(f"n{i}", sampling=Sampling(max_tokens=50, n=5)) for i in range(4)]
        reads = await lane.until_closed(*rids)
    for i, read in enumerate(reads):
        assert read.texts == dict.fromkeys(range(5), f"n{i}")


LONG: dict[str, Any] = {"tokens": ["x"], "repeat": 2_000, "token_ms": 20}


async def test_a_running_job_is_aborted_when_cancelled(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=1) as lane, lane.worker():
        rid = await lane.ask(LONG)
        await lane.until_tokens(rid, 3)
        await lane.cancel(rid)
        (after,) = await lane.until_closed(await lane.ask("next"))  # the only slot is free
        made = len((await lane.read(rid)).ids[0])
        await asyncio.sleep(0.3)
        read = await lane.read(rid)
    assert after.text == "next"
    assert len(read.ids[0]) == made
    assert read.state.closed is None  # the ending is for whoever cancelled to write


async def test_a_queued_job_that_is_cancelled_never_runs(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=1) as lane:
        early = await lane.ask("cancelled before the worker came")
        await lane.cancel(early)
        async with lane.worker():
            running = await lane.ask({"tokens": ["x"], "repeat": 50, "token_ms": 20})
            queued = await lane.ask("cancelled in the window")
            other = await lane.ask("another tenant's cancel doesn't count")
            await lane.until_tokens(running, 1)
            await lane.cancel(queued)
            await lane.cancel(other, tenant="someone-else")
            await lane.until_closed(running, other)
            reads = [await lane.read(early), await lane.read(queued)]
    assert [read.counted for read in reads] == [[], []]


async def test_what_is_past_its_deadline_never_runs(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=1) as lane, lane.worker():
        running = await lane.ask({"tokens": ["x"], "repeat": 100, "token_ms": 20})
        await lane.until_tokens(running, 1)
        late = await lane.ask("too late", timeout_ms=300)
        (read,) = await lane.until_closed(late)
        still_running = (await lane.read(running)).state.closed is None
        await lane.until_closed(running)
        await asyncio.sleep(0.3)
        read = await lane.read(late)
    assert still_running
    assert isinstance(read.ending, InferenceFailed)
    assert (read.ending.reason, read.ending.if_not_started) == ("deadline_exceeded", True)
    assert read.counted == [read.ending]
    assert not read.ignored


JUNK = {
    "neither form": b"\xff\x00",
    "no value": None,
    "an unknown schema": b"\xc3\x01" + bytes(8) + b"abc",
    "cut": encode(InferenceCancelled("r", "t"))[:-1],
    "no work": encode(InferenceCancelled("r", "t")),
    "not JSON": b"{nonsense",
    "work for another model": encode(
        InferenceScheduled(
            "r", "t", "other", "1", "interactive", (1,), Sampling(max_tokens=1), 0, 0, Reply(TOKENS, 0), "s"
        )
    ),
}


async def test_junk_is_put_aside_and_the_next_record_is_served(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        for value in JUNK.values():
            await (await lane.producer.send_raw(lane.topic(), value, b"key", 0))
        (read,) = await lane.until_closed(await lane.ask("good"))
        letters = [
            event
            async for record in read_to_end(kafka, DEAD_LETTERS)
            if isinstance(event := Codec().decode(record.value), RecordDeadLettered) and event.topic == lane.topic()
        ]
    assert read.text == "good"
    assert [letter.value for letter in letters] == list(JUNK.values())
    assert {letter.reason for letter in letters} == {"undecodable"}


@pytest.mark.parametrize("reply", [Reply("tokens.nobody-has-it", 0), Reply(TOKENS, 999)])
async def test_a_reply_that_goes_nowhere_is_put_aside(kafka: KafkaSettings, reply: Reply) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        await lane.ask("lost", reply=reply)
        (read,) = await lane.until_closed(await lane.ask("good"))
    assert read.text == "good"


async def test_a_failing_engine_ends_the_request_and_no_other(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        good = await lane.ask({"tokens": ["good "], "repeat": 20, "token_ms": 10})
        bad = await lane.ask({"tokens": ["a", "b"], "raise": "error"})
        both = await lane.ask({"tokens": ["a", "b"], "raise": "error"}, sampling=Sampling(max_tokens=50, n=3))
        reads = await lane.until_closed(good, bad, both)
    assert reads[0].text == "good " * 20
    for read in reads[1:]:
        assert isinstance(read.ending, InferenceFailed)
        assert read.ending.reason == "engine_error"
        assert read.ending.totals == read.state.accepted
    assert reads[1].text == "ab"


async def test_a_record_that_is_in_the_log_twice_is_answered_once(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        rid = await lane.ask({"tokens": ["once "], "repeat": 20, "token_ms": 10})
        await lane.ask({"tokens": ["once "], "repeat": 20, "token_ms": 10}, rid=rid)
        await lane.until_closed(rid)
        await lane.ask({"tokens": ["once "], "repeat": 20, "token_ms": 10}, rid=rid)
        await lane.until_closed(await lane.ask({"first_token_ms": 500}))
        read = await lane.read(rid)
    assert read.text == "once " * 20
    assert isinstance(read.ending, InferenceCompleted)


async def test_an_answer_that_nobody_watches_goes_out_in_large_chunks(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        rid = await lane.ask({"tokens": ["🙂"], "repeat": 300}, stream=False)
        (read,) = await lane.until_closed(rid)
    assert read.text == "🙂" * 300
    assert sum(isinstance(event, TokensGenerated) for event in read.counted) < 30


async def test_a_fast_engine_does_not_outrun_the_log(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        rids = [await lane.ask({"tokens": ["ab"], "repeat": 3_000}, max_tokens=5_000) for _ in range(4)]
        reads = await lane.until_closed(*rids)
    for read in reads:
        assert read.text == "ab" * 2_500
        assert isinstance(read.ending, InferenceCompleted)
        assert read.ending.choices[0].finish_reason == "length"


async def test_stops_and_log_probabilities(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        script = {"tokens": ["abc", "DEF", "G", "HI", "J", "never"]}
        stopped = await lane.ask(script, sampling=Sampling(max_tokens=100, stop=("DEFGHIJ",)))
        missed = await lane.ask(script, sampling=Sampling(max_tokens=100, stop=("DEFGHIK",), logprobs=2))
        reads = await lane.until_closed(stopped, missed)
    assert [read.text for read in reads] == ["abc", "abcDEFGHIJnever"]
    assert isinstance(reads[0].ending, InferenceCompleted)
    assert reads[0].ending.choices[0].stop_reason == "DEFGHIJ"
    chunks = [event for event in reads[1].counted if isinstance(event, TokensGenerated)]
    scored = [score for chunk in chunks for score in chunk.logprobs or ()]
    assert [score.token_id for score in scored] == reads[1].ids[0]
    assert b"".join(score.text for score in scored[:-1]) == b"abcDEFGHIJnever"
    assert all(len(score.top) == 2 for score in scored)


async def test_a_worker_tells_what_it_does_and_says_goodbye(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, partitions=2, slots=3) as lane:
        async with lane.worker(report_interval_ms=100) as stop:
            rids = [await lane.ask({"tokens": ["x"], "repeat": 50, "token_ms": 20}) for _ in range(5)]
            await lane.until_tokens(rids[0], 20)
            await lane.until_closed(*rids)
            stop.set()
        reports = await lane.reports(lane.last_worker_id)
        tombstones = [
            r async for r in read_to_end(kafka, WORKERS) if r.key == lane.last_worker_id.encode() and r.value is None
        ]
    states = [report.state for report in reports]
    assert [states[0], states[-1]] == ["starting", "stopped"]
    assert list(dict.fromkeys(states)) == ["starting", "ready", "draining", "stopped"]
    assert max(report.running for report in reports) == 3
    assert max(report.waiting for report in reports) == 2
    assert max(report.tokens_per_s for report in reports) > 0
    assert reports[-1].service_ms >= 49 * 20
    assert reports[0].start_up_ms == 0 < reports[-1].start_up_ms
    busy = next(report for report in reports if report.running == 3)
    assert busy.slots == 3
    assert {part.topic for part in busy.partitions} == {lane.topic("interactive"), lane.topic("batch")}
    assert len(busy.partitions) == 4
    assert reports[-1].running == 0
    assert len(tombstones) == 1


async def test_everything_is_committed_before_it_leaves(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane:
        async with lane.worker():
            await lane.until_closed(*[await lane.ask(f"{i}") for i in range(10)])
        consumer = make_consumer(kafka, group=f"work.{lane.version.model}.1")
        await consumer.start()
        committed = await consumer.committed(TopicPartition(lane.topic(), 0))
        await consumer.stop()
    assert committed == 10


async def test_a_window_smaller_than_the_backlog_serves_all_of_it(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=2) as lane:
        rids = [await lane.ask(f"{i}") for i in range(100)]
        async with lane.worker(window_records=1):
            reads = await lane.until_closed(*rids)
    assert [read.text for read in reads] == [f"{i}" for i in range(100)]
