"""One front door for all tests of this room, in a thread of its own, with a responder that plays the rest of the path."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvloop

from bridge.main import run
from infra import ports
from infra.log import EventProducer
from infra.payloads import Payloads
from infra.settings import BridgeSettings, KafkaSettings
from schemas.events import ApiKey, ModelPromoted, ModelVersionRegistered, TenantChanged
from schemas.topics import REGISTRY, TENANTS
from tests.bridge.responder import VERSION, Responder
from tests.bridge.tensors import tensor_models
from tests.small_models import small_versions

MODEL = "bridge-model"
KEY = "hr-bridge-good"
REVOKED = "hr-bridge-revoked"
BATCH_ONLY = "hr-bridge-batch"
DISABLED = "hr-bridge-disabled"
TENANT = "bridge-tenant"
OTHER, OTHER_TENANT = "hr-bridge-other", "bridge-other"
WAIT_S = 20.0


@dataclass
class RunningBridge:
    """A front door, and what stands behind it."""

    url: str
    settings: BridgeSettings
    responder: Responder
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def headers(self) -> dict[str, str]:
        """A good caller's."""
        return {"Authorization": f"Bearer {KEY}"}

    def client(self, **options: object) -> httpx.AsyncClient:
        """A good caller."""
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=WAIT_S, **options)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what happens in the bridge's thread."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, "waited too long"
            await asyncio.sleep(0.01)


def _key(
    key_id: str, key: str, tiers: tuple[str, ...] = ("interactive", "batch"), revoked_ms: int | None = None
) -> ApiKey:
    return ApiKey(key_id, hashlib.sha256(key.encode()).hexdigest(), tiers, 1, revoked_ms)


async def _register(settings: KafkaSettings) -> None:
    producer = EventProducer(settings, "bridge-tests")
    await producer.start()
    await producer.send_and_wait(TENANTS, TenantChanged(OTHER_TENANT, "salt", (_key("o", OTHER),), 1), key=OTHER_TENANT)
    keys = (_key("good", KEY), _key("gone", REVOKED, revoked_ms=2), _key("batch", BATCH_ONLY, ("batch",)))
    await producer.send_and_wait(TENANTS, TenantChanged(TENANT, "salt", keys, 1), key=TENANT)
    disabled = TenantChanged("bridge-disabled", "salt", (_key("k", DISABLED),), 1, disabled=True)
    await producer.send_and_wait(TENANTS, disabled, key="bridge-disabled")
    registered = ModelVersionRegistered(MODEL, VERSION, "scripted", "", 4096, created_ms=1_700_000_000_000)
    await producer.send_and_wait(REGISTRY, registered, key=MODEL)
    await producer.send_and_wait(REGISTRY, ModelPromoted(MODEL, VERSION), key=MODEL)
    for model in tensor_models(VERSION):
        await producer.send_and_wait(REGISTRY, model, key=model.model)
        await producer.send_and_wait(REGISTRY, ModelPromoted(model.model, VERSION), key=model.model)
    for version in small_versions("bridge"):
        await producer.send_and_wait(REGISTRY, version, key=version.model)
        await producer.send_and_wait(REGISTRY, ModelPromoted(version.model, version.version), key=version.model)
    await producer.stop()


async def _main(
    settings: BridgeSettings, responder: Responder | None, started: Callable[[RunningBridge], None]
) -> None:
    await _register(settings.kafka)
    stop = asyncio.Event()
    answering: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if responder is None:
        responder = Responder(settings.kafka, settings.grant_secret, payloads=Payloads.of(settings))
        answering = asyncio.ensure_future(responder.run())
        await responder.ready.wait()
    serving = asyncio.create_task(run(settings, stop))
    bridge = RunningBridge(f"http://127.0.0.1:{settings.port}", settings, responder, asyncio.get_running_loop(), stop)
    async with httpx.AsyncClient(base_url=bridge.url) as client:
        while True:
            try:
                if (await client.get("/readyz")).status_code == 200:
                    break
            except httpx.TransportError:
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0.02)
    started(bridge)
    try:
        await serving
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        bridge.stopped.set()


def start_bridge(
    settings: BridgeSettings, responder: Responder | None = None
) -> tuple[RunningBridge, threading.Thread]:
    """A bridge in its own thread and loop; set its stop event and join to end it. Brings a responder unless another answers."""
    holder: list[RunningBridge] = []
    errors: list[BaseException] = []
    ready = threading.Event()

    def started(bridge: RunningBridge) -> None:
        holder.append(bridge)
        ready.set()

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_main(settings, responder, started))
        except BaseException as error:
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main, name="bridge", daemon=True)
    thread.start()
    assert ready.wait(60)
    if errors:
        raise errors[0]
    return holder[0], thread


def stop_bridge(bridge: RunningBridge, thread: threading.Thread) -> None:
    """End it in good order."""
    bridge.loop.call_soon_threadsafe(bridge.stop.set)
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def bridge(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBridge]:
    """The front door with limits small enough to reach."""
    data_dir: Path = tmp_path_factory.mktemp("bridge")
    settings = BridgeSettings(
        kafka=kafka,
        data_dir=data_dir,
        port=ports.free_port(),
        grpc_port=ports.free_port(),
        ops_port=ports.free_port(),
        grant_secret=b"bridge-tests-grant-secret-0123456789",
        instance="bridge-tests",
        keepalive_ms=300,
        reader_pending_bytes_max=64 * 1024,
        reader_stall_ms=20_000,
        socket_requests_max=4,
        drain_ms=1_000,
    )
    running, thread = start_bridge(settings)
    yield running
    stop_bridge(running, thread)


@pytest.fixture(scope="session")
def other(bridge: RunningBridge) -> Iterator[RunningBridge]:
    """Another front door on the same log, with a partition of its own."""
    settings = dataclasses.replace(
        bridge.settings,
        port=ports.free_port(),
        grpc_port=0,
        ops_port=0,
        instance="bridge-tests-other",
        keepalive_ms=200,
    )
    running, thread = start_bridge(settings, bridge.responder)
    yield running
    stop_bridge(running, thread)


@pytest.fixture(scope="module")
def http(bridge: RunningBridge) -> Iterator[httpx.Client]:
    """A good caller over HTTP."""
    with httpx.Client(base_url=bridge.url, headers=bridge.headers, timeout=WAIT_S) as client:
        yield client
