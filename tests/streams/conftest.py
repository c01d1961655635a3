from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from infra.settings import KafkaSettings
from tests.streams.site import Agent, Site, open_site


@pytest.fixture(scope="module")
def admission(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running admission of the interactive tier."""
    agent = Agent("admission", kafka, tmp_path_factory.mktemp("admission"))
    agent.start()
    yield agent
    assert agent.stop() == 0, agent.log.read_text()


@pytest.fixture(scope="module")
def endings(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running endings."""
    agent = Agent("endings", kafka, tmp_path_factory.mktemp("endings"))
    agent.start()
    yield agent
    assert agent.stop() == 0, agent.log.read_text()


@pytest.fixture(scope="module")
def lifecycle(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running keeper of deadlines."""
    agent = Agent("lifecycle", kafka, tmp_path_factory.mktemp("lifecycle"))
    agent.start()
    yield agent
    assert agent.stop() == 0, agent.log.read_text()


@pytest.fixture
async def site(kafka: KafkaSettings) -> AsyncIterator[Site]:
    """A tenant and a model of their own."""
    async with open_site(kafka) as found:
        yield found
