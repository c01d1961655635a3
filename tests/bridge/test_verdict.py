"""What admission decided of a request, as a front door finds it in `lifecycle`, where two owners of a partition may have told of it."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition

from bridge.replay import LATE_MS, verdict
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.events import InferenceAdmitted, InferenceRejected
from schemas.ids import request_id
from tests.decisions.ledgers import Asked, admitted, rejected

MADE_MS = 1_700_000_000_000
ID = request_id(MADE_MS, bytes(10))
ASKED = Asked(MADE_MS, ID, 8, "k1")
IN, OUT = admitted(ASKED), rejected(ASKED)


class Log:
    """A consumer of `lifecycle`, which has one partition with these events, each so long after the id was made."""

    def __init__(self, *told: tuple[int, Any]) -> None:
        self._records = [
            ConsumerRecord("lifecycle", 0, offset, MADE_MS + after_ms, 0, b"acme", encode(event), None, 4, 0, ())
            for offset, (after_ms, event) in enumerate(told)
        ]
        self._place = 0

    def partitions_for_topic(self, _topic: str) -> set[int]:
        return {0}

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, len(self._records))

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        return {place: next((one for one in self._records if one.timestamp >= ms), None) for place, ms in times.items()}

    def assign(self, _partitions: list[TopicPartition]) -> None: ...

    def seek(self, _partition: TopicPartition, offset: int) -> None:
        self._place = offset

    async def position(self, _partition: TopicPartition) -> int:
        return self._place

    async def getmany(self, place: TopicPartition, **_: Any) -> dict[TopicPartition, list[ConsumerRecord]]:
        records, self._place = self._records[self._place : self._place + 1], self._place + 1
        return {place: records}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([(1, IN)], IN),
        ([(1, OUT)], OUT),
        ([(1, IN), (2, OUT)], IN),
        ([(1, OUT), (2, IN)], IN),
        ([(1, OUT), (LATE_MS + 2, IN)], OUT),
        ([(1, OUT), (2, admitted(Asked(MADE_MS, ID, 8, "k1", "other")))], OUT),
    ],
)
async def test_of_two_decisions_the_admission_stands(
    told: list[tuple[int, Any]], found: InferenceAdmitted | InferenceRejected
) -> None:
    consumer: Any = Log(*told)
    assert await verdict(consumer, EventDecoder(KafkaSettings()), ID, "acme") == found
