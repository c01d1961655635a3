"""One stack of real processes for all system tests, on a broker of its own: other rooms' tests join the same consumer groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.broker import EmbeddedKafka
from tests.system.fixtures_models import busy, narrow, single, wide
from tests.system.fixtures_small import made, small
from tests.system.fixtures_vllm import llm
from tests.system.running import RunningStack
from tests.system.small_door import http, infer

__all__ = ["busy", "http", "infer", "llm", "made", "narrow", "single", "small", "stack", "system_broker", "wide"]


@pytest.fixture(scope="session")
def system_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """The broker of the system tests."""
    with EmbeddedKafka(tmp_path_factory.mktemp("system-kafka")) as broker:
        yield broker


@pytest.fixture(scope="session")
def stack(system_broker: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Everything, ready. A test that hurts a process leaves it running and ready."""
    running = RunningStack(system_broker.settings, tmp_path_factory.mktemp("system-data"))
    try:
        running.start()
        yield running
    finally:
        running.close()
