"""What tests of the outside world share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest

from infra.broker import EmbeddedKafka
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
def topic_of() -> Callable[..., Awaitable[str]]:
    """Makes a topic of two partitions on a cluster, and returns its name."""

    async def make(settings: KafkaSettings, *, compacted: bool = False) -> str:
        name = f"test-{uuid.uuid4().hex[:8]}"
        await ensure(settings, [TopicSpec(name, 2, "id", compacted=compacted)])
        return name

    return make
