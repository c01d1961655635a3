"""A topic that a broker doesn't name just after its start is believed to be there for a while, and one that never was isn't."""

from __future__ import annotations

from typing import Any

import pytest

from infra.settings import KafkaSettings
from streams.world import FORGOTTEN_S, KNOWN_S, MISSING_S, PartitionCounts

TOPIC = "tokens"


class Admin:
    """Names the topics that it has been told of."""

    def __init__(self) -> None:
        self.topics = {TOPIC: 3}
        self.asked = 0

    async def describe_topics(self, topics: list[str]) -> list[dict[str, Any]]:
        self.asked += 1
        return [
            {"error_code": 0 if name in self.topics else 3, "partitions": [None] * self.topics.get(name, 0)}
            for name in topics
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr("streams.world.time.monotonic", lambda: now[0])
    return now


def counts() -> tuple[PartitionCounts, Admin]:
    made, admin = PartitionCounts(KafkaSettings("localhost:9092")), Admin()
    made._admin = admin
    return made, admin


async def test_what_was_there_is_believed_for_a_while(clock: list[float]) -> None:
    made, admin = counts()
    await made.learn(TOPIC)
    admin.topics.clear()
    clock[0] += KNOWN_S
    for _ in range(int(FORGOTTEN_S / MISSING_S)):
        await made.learn(TOPIC)
        assert made.known(TOPIC) == 3
        clock[0] += MISSING_S
    await made.learn(TOPIC)
    assert made.known(TOPIC) is None
    assert admin.asked == FORGOTTEN_S / MISSING_S + 2
    clock[0] += MISSING_S
    admin.topics[TOPIC] = 5
    await made.learn(TOPIC)
    assert made.known(TOPIC) == 5


async def test_what_never_was_is_missing_at_once(clock: list[float]) -> None:
    made, admin = counts()
    await made.learn("other")
    assert made.known("other") is None
    await made.learn("other")
    assert admin.asked == 1
