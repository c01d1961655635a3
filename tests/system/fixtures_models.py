"""More models on the system stack: with many slots, with a single partition, with a single slot, and with a context of megabytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest

from cli.models import register_versions
from cli.registry import now_ms
from infra.log import EventProducer
from infra.models_file import ModelEntry
from schemas.events import WorkerReported
from schemas.topics import WORKERS
from tests.system.running import RunningStack
from workers.report import STOPPED

BUSY, SINGLE, NARROW, WIDE = "busy", "single", "narrow", "wide"
SESSION_MS = 6_000
"""The shortest session that the broker allows."""


@contextmanager
def workers(stack: RunningStack, models: Mapping[str, str]) -> Iterator[None]:
    """Worker processes while the block runs, each of a model, by their names. They start side by side."""
    with ExitStack() as cleanup:
        for name, model in models.items():
            stack.add(name, "worker", model, "1", HEADRACE_WORKER_SESSION_TIMEOUT_MS=str(SESSION_MS))
            cleanup.callback(stack.remove, name)
        for name in models:
            stack.await_ready(name)
        yield


@contextmanager
def worker(stack: RunningStack, name: str, model: str) -> Iterator[str]:
    """A worker process while the block runs; yields its name."""
    with workers(stack, {name: model}):
        yield name


def tell_of_start(stack: RunningStack, model: str, start_up_ms: int) -> None:
    """A worker of a model tells the log that it took so long to be ready, and is gone: starts of real ones here differ several times over."""
    last = WorkerReported("earlier", model, "1", STOPPED, (), 1, 0, 0, started_ms=now_ms(), start_up_ms=start_up_ms)

    async def write() -> None:
        producer = EventProducer(stack.kafka, "worker")
        await producer.start()
        try:
            await producer.send_and_wait(WORKERS, last, key=last.worker_id)
        finally:
            await producer.stop()

    stack.thread.run(write())


def register(stack: RunningStack, entry: ModelEntry) -> None:
    """Makes a model of the scripted engine known."""
    stack.thread.run(register_versions(stack.kafka, [entry.registered(None, now_ms())]))


@pytest.fixture(scope="module")
def busy(stack: RunningStack) -> Iterator[str]:
    """A model with room for many calls at once, and one worker, `busy-a`. Yields the model's name."""
    register(stack, ModelEntry(BUSY, "1", "scripted", "scripted", 4096, slots=64))
    with worker(stack, "busy-a", BUSY):
        yield BUSY


@pytest.fixture(scope="module")
def single(stack: RunningStack) -> Iterator[str]:
    """A model with one partition, and one worker, `single-a`. Yields the model's name."""
    register(stack, ModelEntry(SINGLE, "1", "scripted", "scripted", 4096, slots=4, partitions=1))
    with worker(stack, "single-a", SINGLE):
        yield SINGLE


@pytest.fixture(scope="module")
def narrow(stack: RunningStack) -> Iterator[str]:
    """A model that answers one call at a time. Yields the model's name."""
    register(stack, ModelEntry(NARROW, "1", "scripted", "scripted", 4096, slots=1, partitions=1))
    with worker(stack, "narrow", NARROW):
        yield NARROW


@pytest.fixture(scope="module")
def wide(stack: RunningStack) -> Iterator[str]:
    """A model whose answers may be larger than any record. Yields the model's name."""
    register(stack, ModelEntry(WIDE, "1", "scripted", "scripted", 9_000_000, slots=2, partitions=1))
    with worker(stack, "wide", WIDE):
        yield WIDE
