"""Requests that were there when workers died: they go on, then they run alone, and only the one that is to blame is ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from decisions.takeover import FAILURES_MAX
from infra.settings import KafkaSettings
from schemas.events import (
    Attempt,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    Reply,
    Sampling,
)
from schemas.topics import TOKENS
from tests.workers.lane import Lane, open_lane
from tests.workers.test_loop import LONG
from tests.workers.test_takeover import check_whole, process
from workers.engines.port import EngineChunk, EngineDead, EngineRequest, EngineStats
from workers.engines.scripted import EXIT_STATUS, ScriptedEngine

SAME = Reply(TOKENS, 0)
"""One partition, so that the order of events is the order in which they were written."""


async def former_owners(lane: Lane) -> None:
    """The group has had a generation, so that a worker fences what it finds."""
    async with lane.worker():
        pass


async def ask_failed(lane: Lane, failures: int, prompt: str | dict[str, Any], *, n: int = 1, **more: Any) -> str:
    """A request of `n` choices whose first attempts started, and then their workers died."""
    rid = await lane.ask(prompt, reply=SAME, sampling=Sampling(max_tokens=4_000, n=n), **more)
    who = (rid, "acme", lane.version.model, "1", "interactive")
    for counter in range(1, failures + 1):
        attempt = Attempt(0, counter)
        events: list[Any] = [GenerationTakenOver(*who, attempt, "w")] if counter > 1 else []
        for event in (*events, GenerationStarted(*who, attempt, (0,) * n, 3, "w")):
            await lane.producer.send_and_wait(SAME.topic, event, key=rid, partition=SAME.partition)
    return rid


def beside(lane: Lane) -> dict[str, set[str]]:
    """For each request, those that ran at some time while it did."""
    running, found = dict[str, None](), dict[str, set[str]]()
    for event in lane.events:
        match event:
            case GenerationStarted():
                found.setdefault(event.request_id, set()).update(running)
                for other in running:
                    found[other].add(event.request_id)
                running[event.request_id] = None
            case GenerationReleased() | GenerationTakenOver() | InferenceCompleted() | InferenceFailed():
                running.pop(event.request_id, None)
    return found


SHORT: dict[str, Any] = {"tokens": ["abc "], "repeat": 10, "token_ms": 30}


async def test_a_suspect_runs_alone_and_before_fresh_work(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=4) as lane:
        await former_owners(lane)
        fresh = [await lane.ask(SHORT, reply=SAME) for _ in range(3)]
        suspects = [await ask_failed(lane, FAILURES_MAX - 1, SHORT) for _ in range(3)]
        once = [await ask_failed(lane, 1, SHORT) for _ in range(2)]
        await lane.pull()
        del lane.events[:], lane.started[:]
        async with lane.worker():
            reads = await lane.until_closed(*fresh, *suspects, *once)
    assert [read.text for read in reads] == ["abc " * 10] * 8
    neighbours = beside(lane)
    assert [neighbours[rid] for rid in suspects] == [set()] * 3
    assert neighbours[once[0]] == {once[1]}
    assert neighbours[fresh[0]] == {fresh[1], fresh[2]}
    assert [set(lane.started[:2]), set(lane.started[2:5]), set(lane.started[5:])] == [
        set(once),
        set(suspects),
        set(fresh),
    ]


async def test_a_suspects_choices_take_slots_as_any(kafka: KafkaSettings) -> None:
    async with open_lane(kafka, slots=2) as lane:
        await former_owners(lane)
        fresh = await lane.ask(SHORT, reply=SAME)
        suspect = await ask_failed(lane, FAILURES_MAX - 1, SHORT, n=5)
        await lane.pull()
        del lane.events[:]
        async with lane.worker():
            reads = await lane.until_closed(fresh, suspect)
    assert [read.texts for read in reads] == [{0: "abc " * 10}, dict.fromkeys(range(5), "abc " * 10)]
    assert beside(lane)[suspect] == set()


@pytest.mark.parametrize("way", ["cancelled", "late"])
async def test_what_a_suspect_held_back_begins_when_it_no_longer_waits(kafka: KafkaSettings, way: str) -> None:
    async with open_lane(kafka, slots=4) as lane:
        await former_owners(lane)
        long = await ask_failed(lane, 1, LONG)
        suspect = await ask_failed(lane, FAILURES_MAX - 1, SHORT, timeout_ms=60_000 if way == "cancelled" else 8_000)
        async with lane.worker():
            await lane.until_tokens(long, 1)
            fresh = await lane.ask("held back", reply=SAME)
            await asyncio.sleep(0.5)
            assert not (await lane.read(fresh)).starts
            if way == "cancelled":
                await lane.cancel(suspect)
            (read,) = await lane.until_closed(fresh)
            assert (await lane.read(long)).state.closed is None
            await lane.cancel(long)
        told = await lane.read(suspect)
    assert read.text == "held back"
    assert len(told.starts) == FAILURES_MAX - 1
    if way == "late":
        assert isinstance(told.ending, InferenceFailed)
        assert told.ending.reason == "deadline_exceeded"


async def test_a_suspect_that_was_released_is_taken_over_as_one(kafka: KafkaSettings) -> None:
    """A worker that drains gives it up in mid-answer; the next one runs it alone too, and counts no failure."""
    async with open_lane(kafka, slots=4) as lane:
        await former_owners(lane)
        suspect = await ask_failed(lane, FAILURES_MAX - 1, {**SHORT, "repeat": 40})
        async with lane.worker(drain_ms=100):
            await lane.until_tokens(suspect, 8)
        fresh = await lane.ask(SHORT, reply=SAME)
        async with lane.worker():
            reads = await lane.until_closed(suspect, fresh)
    assert [read.text for read in reads] == ["abc " * 40, "abc " * 10]
    assert reads[0].state.failures == FAILURES_MAX - 1
    assert beside(lane)[suspect] == set()


async def test_neighbours_of_a_poisonous_request_are_cleared(kafka: KafkaSettings, tmp_path: Path) -> None:
    """It ends three workers. Two innocent ones run beside it when the first two die; they are answered to the end."""
    deaths = 0
    async with open_lane(kafka, slots=4) as lane:
        good = [await lane.ask({"tokens": ["good "], "repeat": 40, "token_ms": 50}, reply=SAME) for _ in range(2)]
        bad = await lane.ask({"tokens": ["bad "], "repeat": 10, "token_ms": 50, "raise": "exit"}, reply=SAME)
        while await lane.any_open(*good, bad):
            with process(lane, tmp_path) as child:
                while child.poll() is None and await lane.any_open(*good, bad):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                deaths += child.poll() == EXIT_STATUS
            assert deaths <= FAILURES_MAX
        reads = [await lane.read(rid) for rid in (*good, bad)]
    for read in reads[:2]:
        check_whole(read, "good " * 40)
        assert read.state.failures == FAILURES_MAX - 1
    assert isinstance(reads[2].ending, InferenceFailed)
    assert reads[2].ending.reason == "poisoned"
    assert reads[2].text  # its last token dies with its worker
    assert ("bad " * 10).startswith(reads[2].text)
    assert deaths == FAILURES_MAX


class Mortal(ScriptedEngine):
    """Dies when it is told to, as vLLM's process may: all that run are told so, and all that come."""

    dead = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        async for chunk in super().generate(request):
            if self.dead.is_set():
                raise EngineDead("told to")
            yield chunk

    def stats(self) -> EngineStats:
        if self.dead.is_set():
            raise EngineDead("told to")
        return super().stats()


async def test_nothing_begins_on_an_engine_that_is_dead(
    kafka: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits when an engine dies has no part in that."""
    async with open_lane(kafka, slots=2) as lane:
        with process(lane, tmp_path) as child:
            rids = [await lane.ask(LONG) for _ in range(2)]
            for rid in rids:
                await lane.until_tokens(rid, 5)
            os.killpg(child.pid, signal.SIGKILL)
        monkeypatch.setattr(Mortal, "dead", asyncio.Event())
        monkeypatch.setattr("workers.engines.scripted.ScriptedEngine", Mortal)
        with pytest.raises(EngineDead):
            async with lane.worker(slots=1):
                while (starts := [len((await lane.read(rid)).starts) for rid in rids]) == [1, 1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                Mortal.dead.set()
                await asyncio.sleep(1)
        reads = [await lane.read(rid) for rid in rids]
    assert sorted(starts) == [1, 2]
    assert [len(read.starts) for read in reads] == starts
