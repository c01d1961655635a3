"""What endings lets go of when it holds too much: no more than that, and where most of it is; and what it passes over."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition

from infra.log import EventProducer, Headers, RecordTooLarge
from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from infra.settings import EndingsSettings, KafkaSettings
from infra.tracing import new_traceparent, trace_id
from schemas.codec import Codec
from schemas.events import (
    Attempt,
    ChoiceEnd,
    Event,
    GenerationStarted,
    InferenceAnswered,
    InferenceCancelled,
    InferenceCompleted,
    InferenceJoined,
    PayloadStored,
    Reply,
    Tensor,
    Timings,
    TokensGenerated,
    Usage,
)
from schemas.topics import HOUR_MS, TOKENS
from streams import endings as module
from streams.endings import Endings
from streams.fold_table import FoldTable

A = Attempt(1, 1)
RID = "01890a5d-ac96-774b-bcce-b302099a8057"


def endings_of(open_requests_max: int, *open_in_each: int, text: str = "") -> Endings:
    """Endings with so many open requests in each partition, each with a text."""
    unused: Any = None
    found = Endings(EndingsSettings(open_requests_max=open_requests_max), unused, unused, unused)
    now_ms = int(time.time() * 1000)
    for number, count in enumerate(open_in_each):
        table = found._tables[TopicPartition(TOKENS, number)] = FoldTable(TOKENS, number, 0, HOUR_MS)
        for i in range(count):
            rid = f"{number}-{i}"
            table.apply(2 * i, now_ms, GenerationStarted(rid, "acme", "m", "1", "interactive", A, (0,), 1, "w"))
            table.apply(2 * i + 1, now_ms, TokensGenerated(rid, 0, A, 0, (), text))
    return found


def held(endings: Endings) -> list[list[str]]:
    return [list(table.open) for table in endings._tables.values()]


async def test_a_busy_partition_may_hold_more_than_its_share() -> None:
    endings = endings_of(10, 9, *[0] * 20)
    endings._bound()
    assert sum(map(len, held(endings))) == 9


async def test_of_too_many_requests_the_oldest_of_the_fullest_partition_go() -> None:
    endings = endings_of(8, 2, 7, 1)
    endings._bound()
    assert held(endings) == [["0-0", "0-1"], ["1-2", "1-3", "1-4", "1-5", "1-6"], ["2-0"]]
    endings = endings_of(1, 3, 3, 3)
    endings._bound()
    assert sum(map(len, held(endings))) == 1


async def test_of_too_much_text_the_oldest_of_the_fullest_partition_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTENT_BYTES_TOTAL_MAX", 450)
    endings = endings_of(100, 1, 4, *[0] * 20, text="x" * 100)
    endings._bound()
    kept = [[request.counted is not None for request in table.open.values()] for table in endings._tables.values()]
    assert kept[:2] == [[True], [False, True, True, True]]


class Producer(EventProducer):
    """Keeps what would be written."""

    def __init__(self, payloads: Payloads) -> None:
        super().__init__(KafkaSettings(), "test", payloads)
        self.values: list[bytes] = []
        self.headers: list[Headers] = []

    async def send_raw(self, _topic: str, value: bytes | None, *more: Any) -> asyncio.Future[Any]:
        self.values.append(value or b"")
        self.headers.append(more[2])
        confirmed = asyncio.get_running_loop().create_future()
        confirmed.set_result(None)
        return confirmed


async def test_an_answer_that_the_object_store_is_too_small_for_is_kept_without_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker could just write may be a little larger as an answer."""
    monkeypatch.setattr("infra.log.INLINE_MAX_BYTES", 10_000)
    monkeypatch.setattr("infra.payloads.OBJECT_MAX_BYTES", 20_000)
    unused: Any = None
    producer = Producer(Payloads(FolderStore(tmp_path)))
    endings = Endings(EndingsSettings(), unused, producer, unused)
    record = ConsumerRecord("tokens", 0, 0, 0, 0, None, None, 0, 0, 0, ())
    for size in (20_000, 15_000):
        outputs = (Tensor("y", "UINT8", (size,), bytes(size)),)
        answer = InferenceAnswered(RID, "acme", "m", "1", "interactive", (), Usage(1, 0), outputs=outputs)
        await endings._write([answer], record)
    kept, stored = [Codec().decode(value) for value in producer.values]
    assert isinstance(kept, InferenceAnswered)
    assert (kept.error_reason, kept.outputs) == ("answer_too_large", ())
    assert isinstance(stored, PayloadStored)


class Read:
    """What endings reads, in this order, from one partition."""

    def __init__(self, *events: Event) -> None:
        self.events = events

    async def decode(self, value: bytes) -> Event:
        return self.events[value[0]]


async def test_what_joins_another_stream_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    buried: list[object] = []
    joined = InferenceJoined("later", "acme", "m", "interactive", "first", Reply(TOKENS, 0), 1)
    endings = endings_of(10, 0)
    endings._decoder = Read(joined, InferenceCancelled("first"))  # type: ignore[assignment]
    monkeypatch.setattr(endings, "_bury", lambda *arguments: buried.append(arguments))
    place = TopicPartition(TOKENS, 0)
    records: Any = [
        SimpleNamespace(topic=TOKENS, partition=0, offset=5 + n, timestamp=1, value=bytes([n])) for n in range(2)
    ]
    await endings.take({place: records[:1]})
    assert (buried, endings._tables[place].committable, held(endings)) == ([], 6, [[]])
    await endings.take({place: records[1:]})
    assert len(buried) == 1


def begun(rid: str) -> GenerationStarted:
    return GenerationStarted(rid, "acme", "m", "1", "interactive", A, (0,), 1, "w")


def over(rid: str) -> InferenceCompleted:
    return InferenceCompleted(
        rid, "acme", "m", "1", "interactive", A, (ChoiceEnd(0, 0, "stop"),), Usage(1, 0), Timings(), "w"
    )


async def test_what_is_read_together_is_written_together_in_its_order_and_each_in_its_own_trace() -> None:
    unused: Any = None
    producer, endings = Producer(Payloads(unused)), endings_of(10, 0)
    endings._producer = producer
    endings._decoder = Read(begun("a"), begun("b"), over("b"), over("a"))  # type: ignore[assignment]
    parents = [new_traceparent().encode() for _ in range(4)]
    place = TopicPartition(TOKENS, 0)
    records: Any = [
        SimpleNamespace(
            topic=TOKENS, partition=0, offset=n, timestamp=1, value=bytes([n]), headers=[("traceparent", parent)]
        )
        for n, parent in enumerate(parents)
    ]
    await endings.take({place: records})
    assert len(endings.writes._tasks) == 1
    assert await endings.writes.settled()
    written = [Codec().decode(value) for value in producer.values]
    assert [(type(event).__name__, getattr(event, "request_id", "")) for event in written] == [
        ("InferenceStarted", "a"), ("InferenceStarted", "b"),
        ("InferenceCompleted", "b"), ("InferenceAnswered", "b"), ("InferenceCompleted", "a"), ("InferenceAnswered", "a"),
    ]  # fmt: skip
    traces = [trace_id([("traceparent", parent)]) for parent in parents]
    assert [trace_id(headers) for headers in producer.headers] == [traces[n] for n in (0, 1, 2, 2, 3, 3)]


async def test_a_commit_during_a_pause_waits_for_what_was_told_before_it() -> None:
    """Else a crash would lose a start or an ending whose record counts as passed."""
    unused: Any = None
    producer, endings = Producer(Payloads(unused)), endings_of(10, 0)
    endings._producer = producer
    paused = asyncio.Event()

    class Pausing(Read):
        async def decode(self, value: bytes) -> Event:
            if value[0] == 2:
                paused.set()
                await asyncio.Event().wait()
            return await super().decode(value)

    endings._decoder = Pausing(begun("a"), over("a"))  # type: ignore[assignment]
    place = TopicPartition(TOKENS, 0)
    records: Any = [
        SimpleNamespace(topic=TOKENS, partition=0, offset=n, timestamp=1, value=bytes([n]), headers=())
        for n in range(3)
    ]
    taking = asyncio.create_task(endings.take({place: records}))
    await paused.wait()
    written: list[int] = []

    class Consumer:
        async def commit(self, offsets: dict[TopicPartition, int]) -> None:
            assert offsets == {place: 2}
            written.append(len(producer.values))

    endings._consumer = Consumer()
    await endings.commit()
    taking.cancel()
    await asyncio.wait({taking})
    assert written == [3]


async def test_what_is_too_large_is_kept_without_its_content_and_what_was_written_with_it_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unused: Any = None
    endings, written = endings_of(10, 0), list[str]()

    class Refusing(Producer):
        async def send_raw(self, topic: str, value: bytes | None, *more: Any) -> asyncio.Future[Any]:
            event = Codec().decode(value)
            if isinstance(event, InferenceAnswered) and event.request_id == "a" and event.error_reason is None:
                raise RecordTooLarge("no")
            written.append(f"{type(event).__name__} {getattr(event, 'error_reason', None)}")
            return await super().send_raw(topic, value, *more)

    endings._producer = Refusing(Payloads(unused))
    endings._decoder = Read(begun("a"), over("a"), begun("b"), over("b"))  # type: ignore[assignment]
    records: Any = [
        SimpleNamespace(topic=TOKENS, partition=0, offset=n, timestamp=1, value=bytes([n]), headers=())
        for n in range(4)
    ]
    await endings.take({TopicPartition(TOKENS, 0): records})
    assert await endings.writes.settled()
    assert written.count("InferenceAnswered answer_too_large") == 1
    assert written.count("InferenceAnswered None") == 1
    assert {"InferenceStarted None", "InferenceCompleted None"} < set(written)
