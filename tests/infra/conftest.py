"""What tests of the outside world share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiokafka.conn import AIOKafkaConnection

from infra.broker import EmbeddedKafka
from infra.log import EventProducer
from infra.settings import KafkaSettings
from infra.topics import ensure, ensure_core
from schemas.topics import TopicSpec


@pytest.fixture(scope="session")
def _second_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(tmp_path_factory.mktemp("spare-kafka")) as broker:
        asyncio.run(ensure_core(broker.settings))
        yield broker


@pytest.fixture
def spare_broker(_second_broker: EmbeddedKafka) -> EmbeddedKafka:
    """A broker that a test may stop, kill and restart; it runs when the test begins."""
    _second_broker.start()
    return _second_broker


@pytest.fixture
def produced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the produce requests that aiokafka's clients send from now on; a test may clear it."""
    asked: list[str] = []
    send = AIOKafkaConnection.send

    def counted(connection: AIOKafkaConnection, request: Any, expect_response: bool = True) -> Any:
        if (name := type(request).__name__).startswith("ProduceRequest"):
            asked.append(name)
        return send(connection, request, expect_response)

    monkeypatch.setattr(AIOKafkaConnection, "send", counted)
    return asked


@pytest.fixture
def topic_of() -> Callable[..., Awaitable[str]]:
    """Makes a topic of two partitions on a cluster, and returns its name."""

    async def make(settings: KafkaSettings, *, compacted: bool = False) -> str:
        name = f"test-{uuid.uuid4().hex[:8]}"
        await ensure(settings, [TopicSpec(name, 2, "id", compacted=compacted)])
        return name

    return make


@pytest.fixture
async def topic(kafka: KafkaSettings, topic_of: Callable[..., Awaitable[str]]) -> str:
    """A new topic on the session's cluster."""
    return await topic_of(kafka)


@pytest.fixture
async def producer(kafka: KafkaSettings) -> AsyncIterator[EventProducer]:
    """A producer on the session's cluster."""
    producer = EventProducer(kafka, "test")
    await producer.start()
    yield producer
    await producer.stop()
