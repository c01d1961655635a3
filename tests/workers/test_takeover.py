"""A worker dies, drains or is joined by another in mid-answer: each request still gets one whole answer and one ending."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decisions.takeover import FAILURES_MAX
from infra.broker import EmbeddedKafka
from infra.log import EventProducer, NotDelivered
from infra.read import read_to_end
from infra.settings import KafkaSettings
from infra.supervisor import STOP_GRACE_S
from infra.topics import ensure_core
from schemas.codec import Codec
from schemas.events import (
    Attempt,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    RecordDeadLettered,
    Reply,
    Sampling,
    TokensGenerated,
)
from schemas.ids import request_id
from schemas.topics import DEAD_LETTERS, TOKENS
from tests.workers.lane import Lane, Read, open_lane
from workers.engines.scripted import EXIT_STATUS
from workers.takeover import CLOCK_SKEW_MS

SLOW: dict[str, Any] = {"tokens": ["Wasser ", "läuft ", "🙂 "], "repeat": 40, "token_ms": 50}
SLOW_TEXT = "Wasser läuft 🙂 " * 40

LEFT_S_MAX = STOP_GRACE_S
"""The supervisor kills whoever takes longer."""


@contextmanager
def process(lane: Lane, tmp_path: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process; it is killed at the end, and its log shown if the test fails."""
    log = tmp_path / "worker.log"
    child = lane.spawn(log, **env)
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        sys.stdout.write(log.read_text(errors="replace"))


def check_whole(read: Read, text: str) -> None:
    assert read.text == text
    assert isinstance(read.ending, InferenceCompleted)
    assert read.ending.usage.completion_tokens == len(text.encode()) + 1
    assert bytes(read.ids[0][:-1]).decode() == text


async def test_a_killed_worker_costs_a_pause_and_nothing_else(kafka: KafkaSettings, tmp_path: Path) -> None:
    async with open_lane(kafka, slots=3) as lane:
        with process(lane, tmp_path) as child:
            slow = [await lane.ask(SLOW) for _ in range(3)]
            queued = [await lane.ask(f"later {i}") for i in range(3)]
            for rid in slow:
                await lane.until_tokens(rid, 100)
            os.killpg(child.pid, signal.SIGKILL)
            async with lane.worker():
                reads = await lane.until_closed(*slow, *queued)
    for read in reads[:3]:
        check_whole(read, SLOW_TEXT)
        assert len(read.starts) == 2
        assert read.starts[1].from_tokens[0] >= 100
        assert read.state.failures == 1
    assert [read.text for read in reads[3:]] == ["later 0", "later 1", "later 2"]


async def test_choices_scores_stops_and_limits_hold_across_the_break(kafka: KafkaSettings, tmp_path: Path) -> None:
    """The break comes in the middle of a stop string, when its first half is held back."""
    script = {"tokens": ["abc", "DEF", "G", "HI", "J", "never"], "token_ms": 1_500}
    async with open_lane(kafka, slots=3) as lane:
        with process(lane, tmp_path) as child:
            stops = await lane.ask(script, sampling=Sampling(max_tokens=100, n=2, logprobs=1, stop=("DEFGHIJ",)))
            short = await lane.ask(script, sampling=Sampling(max_tokens=9))
            for rid, accepted in ((stops, 14), (short, 7)):
                await lane.until_tokens(rid, accepted)
            os.killpg(child.pid, signal.SIGKILL)
            async with lane.worker():
                stopped, cut = await lane.until_closed(stops, short)
    for read in (stopped, cut):
        assert isinstance(read.ending, InferenceCompleted)
        assert len(read.starts) == 2
        assert min(read.starts[1].from_tokens) >= 7
    assert stopped.texts == {0: "abc", 1: "abc"}
    assert isinstance(stopped.ending, InferenceCompleted) and isinstance(cut.ending, InferenceCompleted)
    assert [(end.finish_reason, end.stop_reason, end.total) for end in stopped.ending.choices] == [
        ("stop", "DEFGHIJ", 10)
    ] * 2
    assert stopped.ending.usage.completion_tokens == 20
    chunks = [event for event in stopped.counted if isinstance(event, TokensGenerated)]
    assert all(chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert cut.text == "abcDEFGHI"
    assert [(end.finish_reason, end.total) for end in cut.ending.choices] == [("length", 9)]


async def test_finished_work_above_an_open_record_is_not_answered_twice(kafka: KafkaSettings, tmp_path: Path) -> None:
    """One partition: the first job is slow, the others instant; the worker is killed in the middle of the first."""
    async with open_lane(kafka) as lane:
        with process(lane, tmp_path) as child:
            slow = await lane.ask(SLOW)
            quick = [await lane.ask(f"quick {i}") for i in range(30)]
            before = await lane.until_closed(*quick)
            totals = [len(read.counted) for read in before]
            os.killpg(child.pid, signal.SIGKILL)
            async with lane.worker():
                (read,) = await lane.until_closed(slow)
                after = await lane.until_closed(*quick)
    check_whole(read, SLOW_TEXT)
    assert [len(read.counted) for read in after] == totals
    assert all(isinstance(event, GenerationTakenOver) for read in after for event in read.ignored)


async def test_what_cannot_be_continued_exactly_ends_as_lost(kafka: KafkaSettings, tmp_path: Path) -> None:
    async with open_lane(kafka) as lane:
        with process(lane, tmp_path) as child:
            rid = await lane.ask(SLOW, sampling=Sampling(max_tokens=4_000, presence_penalty=0.5))
            await lane.until_tokens(rid, 50)
            os.killpg(child.pid, signal.SIGKILL)
            async with lane.worker():
                (read,) = await lane.until_closed(rid)
    assert isinstance(read.ending, InferenceFailed)
    assert read.ending.reason == "worker_lost"
    assert read.ending.totals == read.state.accepted
    assert SLOW_TEXT.startswith(read.text)


async def test_a_draining_worker_releases_what_it_cannot_finish(kafka: KafkaSettings, tmp_path: Path) -> None:
    async with open_lane(kafka) as lane:
        with process(lane, tmp_path, HEADRACE_WORKER_DRAIN_MS="300") as child:
            rid = await lane.ask(SLOW)
            await lane.until_tokens(rid, 50)
            child.terminate()
            async with lane.worker():
                assert await asyncio.to_thread(child.wait, 20) == 0
                (read,) = await lane.until_closed(rid)
    check_whole(read, SLOW_TEXT)
    assert any(isinstance(event, GenerationReleased) for event in read.counted)
    assert read.state.failures == 0


async def test_a_draining_worker_finishes_what_it_can(kafka: KafkaSettings, tmp_path: Path) -> None:
    async with open_lane(kafka) as lane:
        with process(lane, tmp_path) as child:
            rid = await lane.ask({**SLOW, "repeat": 10})
            await lane.until_tokens(rid, 20)
            child.terminate()
            (read,) = await lane.until_closed(rid)
            assert await asyncio.to_thread(child.wait, 20) == 0
    check_whole(read, SLOW_TEXT[: len(SLOW_TEXT) // 4])
    assert not any(isinstance(event, GenerationReleased) for event in read.counted)


async def test_a_rebalance_disturbs_no_answer(kafka: KafkaSettings) -> None:
    """A second worker joins and leaves while answers run on all partitions."""
    async with open_lane(kafka, partitions=4, slots=8) as lane, lane.worker():
        rids = [await lane.ask(SLOW, partition=i % 4) for i in range(8)]
        for rid in rids:
            await lane.until_tokens(rid, 20)
        async with lane.worker():
            await asyncio.sleep(0.5)
            more = [await lane.ask(f"more {i}", partition=i % 4) for i in range(8)]
            await lane.until_closed(*more)
        reads = await lane.until_closed(*rids)
    for read in reads:
        check_whole(read, SLOW_TEXT)
        assert read.state.failures == 0


async def test_what_somebody_newer_owns_does_not_hold_up_what_follows(kafka: KafkaSettings) -> None:
    """A record that is in the log twice has two owners, and only one of them answers; the window must move on at both."""
    async with open_lane(kafka, slots=1) as lane:
        async with lane.worker():
            pass  # the group has had a generation, so that the next worker fences
        theirs = await lane.ask("theirs", reply=Reply(TOKENS, 0))
        who = (theirs, "acme", lane.version.model, "1", "interactive")
        newer = GenerationTakenOver(*who, Attempt(1_000_000, 1), "other")
        await lane.producer.send_and_wait(TOKENS, newer, key=theirs, partition=0)
        rids = [await lane.ask(f"{i}") for i in range(5)]
        async with lane.worker(window_records=1):  # which makes a window of two
            reads = await lane.until_closed(*rids)
        left = await lane.read(theirs)
    assert [read.text for read in reads] == [f"{i}" for i in range(5)]
    assert left.counted == [newer]


async def test_a_poisonous_request_is_contained(kafka: KafkaSettings, tmp_path: Path) -> None:
    """A worker's first attempt may end before anybody saw it begin; from the second on each is counted."""
    deaths = 0
    async with open_lane(kafka) as lane:
        rid = await lane.ask({"tokens": ["a"], "raise": "exit"})
        while (await lane.read(rid)).state.closed is None:
            with process(lane, tmp_path) as child:
                while child.poll() is None and (await lane.read(rid)).state.closed is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                deaths += child.poll() == EXIT_STATUS
                if child.poll() is None:
                    (good,) = await lane.until_closed(await lane.ask("good"))
            assert deaths <= FAILURES_MAX + 1
        read = await lane.read(rid)
        letters = [
            event
            async for record in read_to_end(kafka, DEAD_LETTERS)
            if isinstance(event := Codec().decode(record.value), RecordDeadLettered) and event.topic == lane.topic()
        ]
    assert isinstance(read.ending, InferenceFailed)
    assert read.ending.reason == "poisoned"
    assert deaths >= FAILURES_MAX
    assert good.text == "good"
    assert [letter.reason for letter in letters] == ["poisoned"]


@pytest.mark.parametrize("encoding", ["avro", "json"])
async def test_a_direct_producers_stream_is_taken_over_too(kafka: KafkaSettings, tmp_path: Path, encoding: str) -> None:
    async with open_lane(kafka) as lane:
        with process(lane, tmp_path) as child:
            rid = await lane.ask(SLOW, reply=Reply(TOKENS, 3, encoding))
            await lane.until_tokens(rid, 50)
            os.killpg(child.pid, signal.SIGKILL)
            async with lane.worker():
                (read,) = await lane.until_closed(rid)
    check_whole(read, SLOW_TEXT)


async def test_a_send_that_fails_is_taken_over_from_oneself(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_lane(kafka) as lane:
        rid = await lane.ask({**SLOW, "token_ms": 10})
        send, sent = EventProducer.send, []

        async def flaky(self: EventProducer, topic: str, event: Any, **more: Any) -> Any:
            if isinstance(event, TokensGenerated) and event.request_id == rid:
                sent.append(event)
                if len(sent) == 20:
                    raise NotDelivered("once")
            return await send(self, topic, event, **more)

        monkeypatch.setattr(EventProducer, "send", flaky)
        async with lane.worker():
            (read,) = await lane.until_closed(rid)
    check_whole(read, SLOW_TEXT)
    assert len(read.starts) == 2
    assert read.state.failures == 0


async def test_a_broker_that_restarts_costs_a_pause(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path) as broker:
        await ensure_core(broker.settings)
        async with open_lane(broker.settings) as lane, lane.worker():
            rid = await lane.ask({**SLOW, "repeat": 80})
            await lane.until_tokens(rid, 50)
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            (read,) = await lane.until_closed(rid)
            (after,) = await lane.until_closed(await lane.ask("after"))
    check_whole(read, SLOW_TEXT * 2)
    assert after.text == "after"


async def test_a_worker_that_is_told_to_stop_while_the_broker_is_away_leaves_in_time(tmp_path: Path) -> None:
    """It can neither finish nor release anything: once the broker is back the answer goes on as after a death."""
    with EmbeddedKafka(tmp_path) as broker:
        await ensure_core(broker.settings)
        async with open_lane(broker.settings) as lane:
            with process(lane, tmp_path) as child:
                rid = await lane.ask(SLOW)
                await lane.until_tokens(rid, 50)
                broker.pause()
                try:
                    child.terminate()
                    assert await asyncio.to_thread(child.wait, LEFT_S_MAX) == 0
                finally:
                    broker.resume()
            async with lane.worker():
                (read,) = await lane.until_closed(rid)
    check_whole(read, SLOW_TEXT)
    assert len(read.starts) == 2


async def test_a_worker_that_drains_outlasts_a_short_absence_of_the_broker(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path) as broker:
        await ensure_core(broker.settings)
        async with open_lane(broker.settings) as lane:
            with process(lane, tmp_path, HEADRACE_WORKER_DRAIN_MS="1000") as child:
                rid = await lane.ask(SLOW)
                await lane.until_tokens(rid, 50)
                broker.pause()
                child.terminate()
                await asyncio.sleep(2)
                broker.resume()
                assert await asyncio.to_thread(child.wait, LEFT_S_MAX) == 0
            async with lane.worker():
                (read,) = await lane.until_closed(rid)
    check_whole(read, SLOW_TEXT)
    assert read.state.failures == 0


async def test_a_record_written_again_is_taken_over_from_the_stream_of_the_first(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane:
        async with lane.worker():
            pass  # the group's first member knows that nobody was before it
        asked_ms = int(time.time() * 1000)
        rid = request_id(asked_ms, secrets.token_bytes(10))
        reply, attempt = Reply(TOKENS, 3), Attempt(1, 1)
        who = (rid, "acme", lane.version.model, lane.version.version, "interactive")
        for event in (
            GenerationStarted(*who, attempt, (0,), 5, "other"),
            TokensGenerated(rid, 0, attempt, 0, tuple(b"hel"), "hel"),
        ):
            await lane.producer.send_and_wait(TOKENS, event, partition=reply.partition, key=rid)
        await asyncio.sleep(2 * CLOCK_SKEW_MS / 1000)
        async with lane.worker():
            await lane.ask({"tokens": ["hello", " world"]}, rid=rid, reply=reply, requested_ms=asked_ms)
            (read,) = await lane.until_closed(rid)
    assert read.text == "hello world"


async def test_a_record_that_is_left_to_a_newer_owner_holds_no_offset(kafka: KafkaSettings) -> None:
    async with open_lane(kafka) as lane, lane.worker():
        rid = request_id(int(time.time() * 1000), secrets.token_bytes(10))
        who = (rid, "acme", lane.version.model, lane.version.version, "interactive")
        newer = GenerationTakenOver(*who, Attempt(10**6, 1), "other")
        await lane.producer.send_and_wait(TOKENS, newer, partition=3, key=rid)
        await lane.ask("nobody asks for this one", rid=rid, reply=Reply(TOKENS, 3))
        others = [await lane.ask(f"{number}") for number in range(100)]
        await lane.until_closed(*others)
