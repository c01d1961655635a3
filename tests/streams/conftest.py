from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from infra.settings import KafkaSettings
from tests.streams.site import Agent, Site, open_site


def _running(name: str, kafka: KafkaSettings, folders: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent that runs meanwhile, and then stops in good order."""
    agent = Agent(name, kafka, folders.mktemp(name))
    agent.start()
    yield agent
    assert agent.stop() == 0, agent.last_words()


@pytest.fixture(scope="module")
def admission(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running admission of the interactive tier."""
    yield from _running("admission", kafka, tmp_path_factory)


@pytest.fixture(scope="module")
def endings(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running endings."""
    yield from _running("endings", kafka, tmp_path_factory)


@pytest.fixture(scope="module")
def lifecycle(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running keeper of deadlines."""
    yield from _running("lifecycle", kafka, tmp_path_factory)


@pytest.fixture
async def site(kafka: KafkaSettings) -> AsyncIterator[Site]:
    """A tenant and a model of their own."""
    async with open_site(kafka) as found:
        yield found
