"""What several rooms' tests share: one real broker for the whole run, started when a test first asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

from infra.broker import EmbeddedKafka
from infra.settings import KafkaSettings
from infra.topics import ensure_core

# Machines are shared: an example that takes long says nothing of the code.
hypothesis.settings.register_profile("shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Logs go where they went before: commands that run in this process quieten them."""
    library = logging.getLogger("aiokafka")
    level = library.level
    yield
    library.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """The run's broker, with the core topics."""
    with EmbeddedKafka(tmp_path_factory.mktemp("kafka")) as broker:
        asyncio.run(ensure_core(broker.settings))
        yield broker


@pytest.fixture(scope="session")
def kafka(kafka_broker: EmbeddedKafka) -> KafkaSettings:
    """How to reach the run's broker. Tests share its topics: use own topics, groups, tenants and request ids."""
    return kafka_broker.settings
