"""Things that happen between two steps of a worker: no broker, each step told by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndTimestamp

from decisions.window import Waiting, Window, take
from infra.log import EventDecoder, NoSuchPartition, NotDelivered
from infra.settings import KafkaSettings, WorkerSettings
from schemas.codec import encode
from schemas.events import (
    Attempt,
    GenerationStarted,
    InferenceScheduled,
    ModelVersionRegistered,
    RecordDeadLettered,
    Reply,
    Sampling,
    TokensGenerated,
)
from schemas.topics import DEAD_LETTERS
from text.tokenizer import ByteTokenizer
from workers.engines.port import EngineConfig
from workers.engines.scripted import ScriptedEngine
from workers.group import Held
from workers.loop import WorkerLoop
from workers.report import TokenRate
from workers.takeover import _Streams
from workers.token_job import LanguageModel
from workers.work import Work

PLACE = TopicPartition("tokens", 0)
ATTEMPT = Attempt(1, 1)


def scheduled(**more: Any) -> InferenceScheduled:
    return InferenceScheduled(
        "r", "acme", "m", "1", "interactive", (1, 2), Sampling(max_tokens=9), 0, 10_000, Reply("tokens", 0), "s", **more
    )


def work() -> Work:
    record = SimpleNamespace(offset=0, timestamp=10_000)
    return Work(None, record, scheduled(), (), Waiting("interactive", "acme", 1 << 60, 1))  # type: ignore[arg-type]


class Partition:
    """One partition and a reader of it. `between` are written by somebody else after the reader's first question."""

    def __init__(self, between: list[Any]) -> None:
        self.events: list[Any] = []
        self._between = between
        self._at = 0

    def _asked(self) -> None:
        self.events, self._between = [*self.events, *self._between], []

    def assign(self, _places: Any) -> None:
        pass

    def seek(self, _place: TopicPartition, offset: int) -> None:
        self._at = offset

    async def position(self, _place: TopicPartition) -> int:
        return self._at

    async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        found = OffsetAndTimestamp(0, 10_000) if self.events else None
        self._asked()
        return dict.fromkeys(times, found)

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        end = len(self.events)
        self._asked()
        return dict.fromkeys(places, end)

    async def getmany(self, *_places: TopicPartition, **_limits: Any) -> dict[TopicPartition, list[Any]]:
        records = [
            SimpleNamespace(offset=offset, key=b"r", value=encode(event))
            for offset, event in enumerate(self.events)
            if offset >= self._at
        ]
        self._at = len(self.events)
        return {PLACE: records}


async def test_what_a_former_owner_writes_while_its_stream_is_looked_for_is_read() -> None:
    """A partition that was idle: its first record for long comes between the two questions, where it begins and where it ends."""
    late = [
        GenerationStarted("r", "acme", "m", "1", "interactive", ATTEMPT, (0,), 2, "w"),
        TokensGenerated("r", 0, ATTEMPT, 0, (7, 8), "ab"),
    ]
    partition, taken = Partition(late), work()
    streams = _Streams(partition, EventDecoder(KafkaSettings("nowhere:1")), [taken])
    await streams.read(await streams.find())
    await streams.read({PLACE: len(partition.events) - 1})
    assert streams.reading(taken).state.accepted == (2,)


# --- the loop --------------------------------------------------------------------------------------------------------


class Log:
    """A producer whose partitions vanish when told."""

    failure: str | None = None

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.gone = False

    async def send(self, topic: str, event: Any, **_more: Any) -> asyncio.Future[Any]:
        if self.gone and topic != DEAD_LETTERS:
            raise NoSuchPartition(f"the topic {topic} doesn't exist")
        self.events.append(event)
        future = asyncio.get_running_loop().create_future()
        future.set_result(SimpleNamespace(topic=topic, partition=0, offset=len(self.events)))
        return future

    async def send_and_wait(self, topic: str, event: Any, **more: Any) -> Any:
        return await (await self.send(topic, event, **more))

    async def require(self, topic: str, _partition: int) -> None:
        if self.gone:
            raise NoSuchPartition(f"the topic {topic} doesn't exist")


@asynccontextmanager
async def loop_on(log: Log) -> AsyncIterator[WorkerLoop]:
    """A worker that is connected to nothing."""
    version = ModelVersionRegistered("m", "1", "scripted", "scripted", context_length=100, slots=2, tokenizer="bytes")
    engine = ScriptedEngine(EngineConfig("m", "scripted", 100, 2))
    reporter: Any = SimpleNamespace(rate=TokenRate())
    settings = WorkerSettings(kafka=KafkaSettings("nowhere:1"))
    loop = WorkerLoop(settings, version, LanguageModel(engine, ByteTokenizer()), log, reporter)  # type: ignore[arg-type]
    try:
        yield loop
    finally:
        await loop._group.stop()
        await loop._takeover.stop()


def taken_by(loop: WorkerLoop) -> Work:
    """A record that runs: partition, window and all."""
    held = Held(TopicPartition("work.m.1.interactive", 0), 1, take(Window.at(0), 0, 10), 0)
    loop._group.held[held.tp] = held
    record = SimpleNamespace(
        topic=held.tp.topic, partition=0, offset=0, timestamp=10_000, key=b"r", value=b"x", headers=()
    )
    found = Work(held, record, scheduled(), (), Waiting("interactive", "acme", 1 << 60, 1))
    loop._works.hold(found)
    return found


async def test_a_reply_topic_that_vanishes_under_an_answer_ends_that_answer_alone() -> None:
    """Its failed send is retriable, what comes then is not."""
    log = Log()

    class Cut:
        attempt = ATTEMPT

        async def run(self, _queue_ms: float) -> str:
            log.gone = True
            raise NotDelivered("the broker did not take a record")

    async with loop_on(log) as loop:
        work = taken_by(loop)
        await loop._see_through(work, Cut())  # type: ignore[arg-type]
    assert isinstance(log.events[-1], RecordDeadLettered)
    assert work.key not in loop._works
    assert work.held.window.committable == 1


async def test_what_was_taken_from_a_partition_that_is_lost_before_it_is_opened_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Junk before it was put aside while the broker was away. Were it held still, its own record, when it comes again, would pass for a
    repetition and be committed.
    """
    log = Log()
    async with loop_on(log) as loop:
        work = taken_by(loop)
        loop._works.let_go(work)
        batches = [[(work.held, work.record)]]

        async def fetch() -> list[Any]:
            if not batches:
                await asyncio.Event().wait()
            return batches.pop()

        async def open_(_held: Held, _record: Any) -> Work:
            loop._group.held.clear()
            await loop.assigned([work.held])
            return work

        monkeypatch.setattr(loop._group, "fetch", fetch)
        monkeypatch.setattr(loop._intake, "open", open_)
        task = asyncio.create_task(loop._fetch())
        await asyncio.sleep(0.01)
        task.cancel()
    assert work.key not in loop._works
    assert not log.events


async def test_a_rebalance_in_the_middle_of_a_hand_over_takes_no_release_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker leaves all the same: what it released stays so, or the next owner would count a failure."""
    told: list[str] = []

    class Running:
        attempt = ATTEMPT

        async def release(self) -> None:
            told.append("released")

        async def keep(self) -> None:
            told.append("kept")

    async with loop_on(Log()) as loop:
        taken_by(loop).job = Running()  # type: ignore[assignment]
        loop._draining = True

        async def rebalance() -> None:
            await loop.release()
            await loop.assigned([])
            await asyncio.sleep(0)

        monkeypatch.setattr(loop._group, "commit", rebalance)
        monkeypatch.setattr(loop._takeover, "hand_over", _nobody_comes)
        await loop._hand_over()
    assert set(told) == {"released"}


async def _nobody_comes(_works: Any, _leave: Any) -> AsyncIterator[Work]:
    return
    yield


@pytest.mark.parametrize(("generation", "kept"), [(5, True), (6, True), (7, False), (2, False)])
async def test_what_comes_back_is_kept_if_nobody_can_have_had_it_between(generation: int, kept: bool) -> None:
    """A commit that came too late makes aiokafka join once more, and the broker then repeats the present generation."""
    async with loop_on(Log()) as loop:
        work = taken_by(loop)
        group, tp = loop._group, work.held.tp
        consumer = group._consumer
        group.generation = 5
        group._consumer = SimpleNamespace(
            _coordinator=SimpleNamespace(generation=generation), seek=lambda _tp, _offset: None
        )
        await group.rebalanced({tp})
        group._consumer = consumer
        assert (group.held.get(tp) is work.held) is kept
        assert (work.key in loop._works) is kept
