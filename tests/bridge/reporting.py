"""Plays workers that do nothing but report."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import httpx

from infra.log import EventProducer
from infra.settings import KafkaSettings
from schemas.events import WorkerReported
from schemas.topics import WORKERS
from tests.bridge.conftest import WAIT_S, RunningBridge
from tests.bridge.responder import VERSION

REPORT_S = 1.0


def report(worker_id: str, model: str, state: str, version: str = VERSION) -> WorkerReported:
    """Of a worker with nothing to do."""
    return WorkerReported(worker_id, model, version, state, (), 8, 0, 0)


@contextmanager
def worker_of(bridge: RunningBridge, model: str, state: str = "ready", version: str = VERSION) -> Iterator[None]:
    """A worker reports this state of itself while the block runs, then leaves. Returns when the broker has the first report."""
    with _workers(bridge, {model: state}, version):
        yield


@contextmanager
def ready_workers(bridge: RunningBridge, *models: str) -> Iterator[None]:
    """Each of the models has a worker while the block runs, and the front door knows."""
    with _workers(bridge, dict.fromkeys(models, "ready"), VERSION):
        for model in models:
            until(partial(says_ready, bridge, model))
        yield


def says_ready(bridge: RunningBridge, model: str) -> bool:
    """What the front door answers over REST."""
    url = f"{bridge.url}/v2/models/{model}/ready"
    return httpx.get(url, headers=bridge.headers).status_code == httpx.codes.OK


def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.02)


@contextmanager
def _workers(bridge: RunningBridge, states: Mapping[str, str], version: str) -> Iterator[None]:
    begun, stop = asyncio.Event(), asyncio.Event()
    reporting = asyncio.run_coroutine_threadsafe(
        _report(bridge.settings.kafka, states, version, begun, stop), bridge.loop
    )
    try:
        asyncio.run_coroutine_threadsafe(begun.wait(), bridge.loop).result(WAIT_S)
        yield
    finally:
        bridge.loop.call_soon_threadsafe(stop.set)
        reporting.result(WAIT_S)


async def _report(
    settings: KafkaSettings, states: Mapping[str, str], version: str, begun: asyncio.Event, stop: asyncio.Event
) -> None:
    names = {model: f"{model}-{uuid.uuid4().hex}" for model in states}
    producer = EventProducer(settings, "reporting")
    await producer.start()

    async def tell(model: str, state: str) -> None:
        await producer.send_and_wait(WORKERS, report(names[model], model, state, version), key=names[model])

    try:
        while not stop.is_set():
            for model, state in states.items():
                await tell(model, state)
            begun.set()
            try:
                await asyncio.wait_for(stop.wait(), REPORT_S)
            except TimeoutError:
                continue
        for model in states:
            await tell(model, "stopped")
            await (await producer.send_raw(WORKERS, None, names[model].encode()))
    finally:
        await producer.stop()
