"""What another request says of a request is no part of its history."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition

from cli.history import _read_all
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.events import Attempt, InferenceRejected, RecordDeadLettered, TokensGenerated

PLACE = TopicPartition("tokens", 0)
MINE, OTHER = "0193b5c0-0000-7000-8000-000000000000", "0193b5c0-0000-7000-8000-000000000001"


class Once:
    """Gives all its records at once."""

    def __init__(self, *values: bytes) -> None:
        self._records = [
            SimpleNamespace(topic=PLACE.topic, partition=0, offset=i, timestamp=0, key=b"k", value=value, headers=())
            for i, value in enumerate(values)
        ]

    async def getmany(self, *_places: TopicPartition, **_limits: Any) -> dict[TopicPartition, list[Any]]:
        return {PLACE: self._records}

    def pause(self, _place: TopicPartition) -> None:
        pass


async def test_an_answer_that_speaks_of_a_request_is_not_its_answer() -> None:
    own = TokensGenerated(MINE, 0, Attempt(1, 1), 0, (1,), "yes")
    refused = InferenceRejected(MINE, "t", "m", "batch", "model_not_found", f"not {OTHER}")
    letter = RecordDeadLettered("requests.batch", 0, 0, 0, None, MINE.encode(), {}, "undecodable", "junk", "admission")
    spoken = TokensGenerated(OTHER, 0, Attempt(1, 1), 0, (1,), f"You asked about {MINE}.")
    junk = b"\xff" + MINE.encode()
    records = Once(encode(own), encode(spoken), encode(letter), encode(refused), junk)
    decoder = EventDecoder(KafkaSettings("nowhere:1"))
    found = await _read_all(records, decoder, MINE, {PLACE: 5}, everything=False)
    assert [item.event for item in found] == [own, letter, refused, None]
