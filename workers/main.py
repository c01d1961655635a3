"""`headrace worker MODEL VERSION`: waits until the version is registered, loads it, and serves its work."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from decisions.window import guest_slots
from infra.directory import ModelDirectory
from infra.log import EventProducer
from infra.models_file import ONNX
from infra.payloads import Payloads
from infra.reach import until_reached
from infra.settings import WorkerSettings
from infra.telemetry import OpsServer
from infra.topics import ensure_model
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import CONTROL, DEAD_LETTERS, REGISTRY, SCHEMAS, TENANTS, TOKENS, WORKERS
from text.tokenizer import load_tokenizer
from workers.engines.choice import make_engine, make_tensor_engine, resolved, tokenizer_ref
from workers.engines.port import Engine
from workers.engines.shared import SharedEngine
from workers.engines.shared_tensors import SharedTensors
from workers.engines.tensors import TensorEngine
from workers.intake import PROCESS
from workers.loop import WorkerLoop
from workers.report import STARTING, Reporter, served_tiers
from workers.tensor_job import TensorModel
from workers.token_job import LanguageModel

log = structlog.get_logger(PROCESS)

TOPICS = (TENANTS, REGISTRY, SCHEMAS, CONTROL, WORKERS, TOKENS, DEAD_LETTERS)
REGISTRY_WAIT_S = 5.0
"""How often a worker says that it waits for its version to be registered."""


class _Readiness:
    """Why the worker isn't ready, as it changes."""

    def __init__(self) -> None:
        self.loop: WorkerLoop | None = None
        self.phase: str = "connecting"

    def wait(self, missing: str) -> None:
        """Says what is waited for."""
        self.phase = missing

    def __call__(self) -> str | None:
        return self.phase if self.loop is None else self.loop.not_ready


async def run(settings: WorkerSettings, model: str, version: str, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises HeadraceError when it can't start or can't go on: the supervisor starts it again."""
    ready = _Readiness()
    async with OpsServer(settings.ops_port, ready):
        if not await until_reached(settings.kafka, TOPICS, stop, ready.wait):
            return
        ready.phase = f"{model} {version} is not registered"
        registered = await _registered(settings, model, version, stop)
        if registered is None:
            return
        await ensure_model(settings.kafka, registered)
        payloads = Payloads.of(settings)
        producer = EventProducer(settings.kafka, PROCESS, payloads, gather=registered.engine == ONNX)
        await producer.start()
        try:
            await _serve(settings, registered, producer, payloads, ready, stop)
        finally:
            await producer.stop()
            await payloads.close()


async def _registered(
    settings: WorkerSettings, model: str, version: str, stop: asyncio.Event
) -> ModelVersionRegistered | None:
    """The version as registered; None if `stop` comes first."""
    directory = ModelDirectory(settings.kafka)
    await directory.start()
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while (found := directory.version(model, version)) is None and not stopping.done():
            known = ", ".join(f"{each.model} {each.version}" for each in directory.all()) or "none"
            log.warning(
                "the model version is not registered yet; waiting", model=model, version=version, registered=known
            )
            seen = asyncio.ensure_future(
                directory.until(lambda: directory.version(model, version) is not None, REGISTRY_WAIT_S)
            )
            await asyncio.wait({seen, stopping}, return_when=asyncio.FIRST_COMPLETED)
            seen.cancel()
        return found
    finally:
        stopping.cancel()
        await directory.stop()


async def _serve(
    settings: WorkerSettings,
    version: ModelVersionRegistered,
    producer: EventProducer,
    payloads: Payloads,
    ready: _Readiness,
    stop: asyncio.Event,
) -> None:
    tiers = served_tiers(settings, version)
    reporter = Reporter(producer, settings.worker_id, version, settings.report_interval_ms, tiers)
    await reporter.change(STARTING)
    ready.phase = f"loading {version.model} {version.version}"
    version = await asyncio.to_thread(resolved, version, settings.data_dir)
    slots = settings.slots or version.slots
    loading = _Loading(version, slots + guest_slots(slots))
    reporting = asyncio.create_task(reporter.run())
    try:
        model = await loading.model(settings, stop)
        reporting.cancel()
        if model is None:
            return
        loop = WorkerLoop(settings, version, model, producer, reporter, payloads)
        ready.loop = loop
        await loop.run(stop)
    finally:
        reporting.cancel()
        await loading.engine.shutdown()


class _Loading:
    """A version's engine, until it is up."""

    def __init__(self, version: ModelVersionRegistered, slots: int) -> None:
        self._version = version
        self.engine: Engine | TensorEngine = (
            SharedTensors(make_tensor_engine(version)) if version.inputs else SharedEngine(make_engine(version, slots))
        )

    async def model(self, settings: WorkerSettings, stop: asyncio.Event) -> LanguageModel | TensorModel | None:
        """Starts the engine and loads the tokenizer; None if `stop` comes first."""
        engine, version = self.engine, self._version
        model: LanguageModel | TensorModel
        if isinstance(engine, TensorEngine):
            model = TensorModel(engine)
        else:
            model = LanguageModel(engine, await asyncio.to_thread(load_tokenizer, tokenizer_ref(version)))
        starting, stopping = asyncio.ensure_future(engine.start()), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait(
                {starting, stopping}, timeout=settings.start_up_max_ms / 1000, return_when=asyncio.FIRST_COMPLETED
            )
            if starting.done():
                await starting
                log.info("the engine is up", engine=version.engine, model=version.model, version=version.version)
                return model
            if stopping.done():
                return None
            raise HeadraceError(Reason.UNAVAILABLE, f"the engine was not up within {settings.start_up_max_ms} ms")
        finally:
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await starting
