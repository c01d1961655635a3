"""A cluster that was away knows no brokers for a moment, and one that has just started not all its topics: that doesn't mean that one is missing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from infra import kafka as kafka_module
from infra.kafka import partitions_of
from infra.read import assign_all
from schemas.errors import HeadraceError


class Waking:
    """A consumer whose cluster answers from one question on, and has these topics from another on."""

    def __init__(self, answers: float, names: float, topics: dict[str, set[int]]) -> None:
        self._answers, self._names, self._topics = answers, names, topics
        self._client: Any = self
        self.asked = 0

    async def force_metadata_update(self) -> bool:
        self.asked += 1
        return self.asked >= self._answers

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self._topics.get(topic) if self.asked >= self._names else None


async def test_it_is_asked_again_until_it_answers() -> None:
    assert await partitions_of(Waking(4, 4, {"workers": {1, 0}}), "workers") == [0, 1]


async def test_it_is_asked_again_while_it_answers_without_the_topic() -> None:
    assert await partitions_of(Waking(2, 4, {"workers": {1, 0}}), "workers") == [0, 1]


async def test_what_is_known_already_is_not_asked_for() -> None:
    known = Waking(1, 0, {"workers": {1, 0}})
    assert (await partitions_of(known, "workers"), known.asked) == ([0, 1], 0)


async def test_a_topic_is_missing_once_the_cluster_has_said_so_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_module, "MISSING_WAIT_S", 0.3)
    without = Waking(4, math.inf, {"workers": {1, 0}})
    assert await partitions_of(without, "workers") == []
    assert without.asked > 4, "it answered the fourth time"


async def test_nobody_reads_nothing_of_a_topic_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_module, "MISSING_WAIT_S", 0.0)
    with pytest.raises(HeadraceError, match="the topic workers doesn't exist"):
        await assign_all(Waking(1, math.inf, {}), "workers")


async def test_a_cluster_that_never_answers_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_module, "PARTITIONS_WAIT_S", 0.0)
    with pytest.raises(KafkaConnectionError, match="no broker says what partitions workers has"):
        await partitions_of(Waking(math.inf, math.inf, {}), "workers")
