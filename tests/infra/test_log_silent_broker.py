"""A broker that is silent for a while is not taken for one that has no such topic: work would be put aside for good."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infra import log as log_module
from infra.kafka import Producer
from infra.log import EventProducer, NoSuchPartition, NotDelivered
from infra.settings import KafkaSettings


class Silent:
    """A producer whose broker answers `answers` at the end of the wait, and then knows `topics`."""

    def __init__(self, answers: bool, topics: dict[str, set[int]]) -> None:
        self._answers, self._topics = answers, topics
        self.asked_for: set[str] | None = None
        self.client: Any = self
        self.cluster = SimpleNamespace(partitions_for_topic=self._known.get)

    @property
    def _known(self) -> dict[str, set[int]]:
        return self._topics if self._answers else {}

    async def partitions_for(self, _topic: str) -> None:
        await asyncio.get_running_loop().create_future()

    async def force_metadata_update(self) -> bool:
        return self._answers

    def set_topics(self, topics: set[str]) -> None:
        self.asked_for = topics


def producer_on(broker: Silent) -> EventProducer:
    producer = EventProducer(KafkaSettings("nowhere:1"), "test")
    producer._producer = cast(Producer, broker)
    producer._closed = False
    producer._ready.set()
    return producer


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "TOPIC_WAIT_S", 0.05)


async def test_a_broker_that_says_nothing_may_have_the_topic() -> None:
    broker = Silent(False, {"tokens": {0}})
    with pytest.raises(NotDelivered) as caught:
        await producer_on(broker).require("tokens", 0)
    assert caught.value.retriable
    assert "doesn't answer" in caught.value.message
    assert broker.asked_for == set()


async def test_a_broker_that_comes_back_in_time_has_it() -> None:
    await producer_on(Silent(True, {"tokens": {0}})).require("tokens", 0)


async def test_a_broker_that_answers_and_has_it_not() -> None:
    with pytest.raises(NoSuchPartition, match="the topic other doesn't exist"):
        await producer_on(Silent(True, {"tokens": {0}})).require("other", 0)
