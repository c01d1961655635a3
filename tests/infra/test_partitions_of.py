"""A cluster that was away knows no brokers for a moment: that doesn't mean that a topic is missing."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from infra import kafka as kafka_module
from infra.kafka import partitions_of


class Waking:
    """A consumer whose cluster answers at the last of so many questions, and then has these topics."""

    def __init__(self, questions: int, topics: dict[str, set[int]]) -> None:
        self._left, self._topics = questions, topics
        self._client: Any = self

    async def force_metadata_update(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self._topics.get(topic) if self._left <= 0 else None


async def test_it_is_asked_again_until_it_answers() -> None:
    assert await partitions_of(Waking(4, {"workers": {1, 0}}), "workers") == [0, 1]


async def test_a_topic_is_missing_only_if_the_cluster_says_so() -> None:
    assert await partitions_of(Waking(4, {}), "workers") == []


async def test_a_cluster_that_never_answers_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_module, "PARTITIONS_WAIT_S", 0.0)
    with pytest.raises(KafkaConnectionError, match="no broker says what partitions workers has"):
        await partitions_of(Waking(1_000_000, {}), "workers")
