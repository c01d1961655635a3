"""Things that happen between two steps of a worker: no broker, each step told by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndTimestamp

from decisions.window import Waiting
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.events import Attempt, GenerationStarted, InferenceScheduled, Reply, Sampling, TokensGenerated
from workers.takeover import _Streams
from workers.work import Work

PLACE = TopicPartition("tokens", 0)
ATTEMPT = Attempt(1, 1)


def scheduled(**more: Any) -> InferenceScheduled:
    return InferenceScheduled(
        "r", "acme", "m", "1", "interactive", (1, 2), Sampling(max_tokens=9), 0, 10_000, Reply("tokens", 0), "s", **more
    )


def work() -> Work:
    record = SimpleNamespace(offset=0, timestamp=10_000)
    return Work(None, record, scheduled(), (), Waiting("interactive", "acme", 0, 1))  # type: ignore[arg-type]


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
