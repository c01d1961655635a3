"""Admission's process: what it is made of, in which order it starts, and in which it stops."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import structlog

from decisions.signature import has_text
from infra.log import EventDecoder, EventProducer
from infra.payloads import Payloads
from infra.reach import until_reached
from infra.settings import AdmissionSettings
from infra.telemetry import OpsServer
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.topics import (
    ANSWERS,
    CONTROL,
    DEAD_LETTERS,
    DOORS,
    INTERACTIVE,
    LIFECYCLE,
    REGISTRY,
    SCHEMAS,
    TENANTS,
    TOKENS,
    WORKERS,
    idempotency_topic,
    ledger_topic,
    requests_topic,
)
from streams.accounts import Ledgers
from streams.admission import Admission
from streams.cache import ResponseCache
from streams.faust_shell import FaustShell
from streams.lease import Lease
from streams.parking import Parking
from streams.refusals import PROCESS
from streams.revocation import Revocations
from streams.tokenizers import Tokenizers
from streams.turnstile import Turnstile
from streams.world import LiveWorld

TOPICS = (TENANTS, REGISTRY, WORKERS, DOORS, SCHEMAS, TOKENS, LIFECYCLE, CONTROL, ANSWERS, DEAD_LETTERS)
"""What must be there beside the requests."""
OPEN_MAX = 256
"""Records handled at once, over all partitions."""

log = structlog.get_logger("streams.admission")


async def run(settings: AdmissionSettings, stop: asyncio.Event) -> None:
    """Run admission for one tier until `stop` is set. Raises what makes it impossible to go on."""
    topic = requests_topic(settings.tier)
    payloads = Payloads.of(settings)
    producer = EventProducer(settings.kafka, PROCESS, payloads, gather=True)
    decoder = EventDecoder(settings.kafka, payloads)
    world, tokenizers = LiveWorld(settings.kafka), Tokenizers(settings.tokenise_threads)
    ledgers = Ledgers(settings.kafka, settings.tier, producer, decoder)
    world.ledgers = ledgers
    lease = Lease(settings.session_timeout_ms)
    parking = Parking(settings, producer) if settings.tier != INTERACTIVE else None
    turnstile = Turnstile(world, settings.tier, settings.worker_stale_ms, parking)
    cache = ResponseCache(settings, world, decoder)
    admission = Admission(settings, producer, decoder, world, tokenizers, ledgers, lease, turnstile, cache)
    group = f"admission.{settings.tier}"
    shell = FaustShell(settings, topic, group, admission.handle, OPEN_MAX, lease, (ledgers, turnstile))
    turnstile.reading = shell
    if parking is not None:
        parking.reading = shell
    waiting: str | None = "connecting"

    def wait(missing: str) -> None:
        nonlocal waiting
        waiting = missing

    def not_ready() -> str | None:
        return waiting or shell.not_ready or ledgers.not_ready or producer.failure or world.failure

    ops = OpsServer(settings.ops_port, not_ready)
    async with contextlib.AsyncExitStack() as cleanup:
        await ops.start()
        cleanup.push_async_callback(ops.stop)
        cleanup.push_async_callback(payloads.close)
        if not await until_reached(
            settings.kafka, (topic, ledger_topic(settings.tier), idempotency_topic(settings.tier), *TOPICS), stop, wait
        ):
            return
        wait("the directories aren't read yet")
        await asyncio.gather(producer.start(), world.start())
        cleanup.push_async_callback(producer.stop)
        cleanup.push_async_callback(world.stop)
        cache.start()
        cleanup.push_async_callback(cache.stop)
        cleanup.callback(tokenizers.close)
        waiting = None
        warm = [
            asyncio.ensure_future(_warm(tokenizers, version)) for version in world.models.all() if has_text(version)
        ]
        await asyncio.gather(*warm)
        await world.counts.learn(topic)
        ledgers.start(shell.committed, lease)
        cleanup.push_async_callback(ledgers.stop)
        cleanup.push_async_callback(shell.stop)
        cleanup.push_async_callback(ledgers.save_last)
        if parking is not None:
            cleanup.push_async_callback(parking.stop)
        cleanup.callback(turnstile.close)
        await shell.start()
        log.info("admission runs", tier=settings.tier)
        revoking = asyncio.create_task(Revocations(world, ledgers, producer, settings.tier).run(), name="revocations")
        cleanup.callback(revoking.cancel)
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        watched: list[asyncio.Future[Any]] = [shell.failed, revoking, *ledgers.tasks]
        done, _ = await asyncio.wait([stopping, *watched], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for ended in done - {stopping}:
            ended.result()


async def _warm(tokenizers: Tokenizers, version: ModelVersionRegistered) -> None:
    """A model whose tokenizer can't be read fails its own requests, not the tier."""
    try:
        await tokenizers.get(version)
    except HeadraceError as error:
        log.error("a tokenizer can't be read", model=version.model, version=version.version, message=error.message)
