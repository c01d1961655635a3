"""The bridge as a process: what it starts, in which order, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import structlog

from bridge.app import make_app
from bridge.auth import Authenticator
from bridge.door import FrontDoor
from bridge.event_ids import EventIds
from bridge.joining import Joins
from bridge.resume import Resumes
from bridge.servers import make_server
from bridge.streams import Dispatcher, reply_partition
from infra import ports
from infra.directory import ModelDirectory, TenantDirectory, WorkerDirectory
from infra.log import EventDecoder, EventProducer
from infra.payloads import Payloads
from infra.reach import until_reached
from infra.settings import BridgeSettings
from infra.settings import grant_secret as read_grant_secret
from infra.telemetry import OpsServer
from schemas.events import Reply
from schemas.topics import (
    ANSWERS,
    BATCH,
    DOORS,
    INTERACTIVE,
    LIFECYCLE,
    REGISTRY,
    SCHEMAS,
    TENANTS,
    TOKENS,
    WORKERS,
    requests_topic,
)

if TYPE_CHECKING:
    from bridge.inference.grpc_server import GrpcServer

PROCESS = "bridge"
PURPOSE = "the front door"
GRPC_PURPOSE = "the front door's gRPC"
TOPICS = (
    requests_topic(INTERACTIVE),
    requests_topic(BATCH),
    TENANTS,
    REGISTRY,
    WORKERS,
    DOORS,
    SCHEMAS,
    TOKENS,
    LIFECYCLE,
    ANSWERS,
)
DRAIN_MAX_S = 20.0
"""Less than what the process's frame grants for a stop."""
WS_ENVELOPE_BYTES = 16 * 1024
"""What a socket's message may have around a request's body."""

_log = structlog.get_logger(PROCESS)


class _Readiness:
    """Why the front door can't serve, as it changes."""

    def __init__(self) -> None:
        self._waiting = "connecting"
        self._door: FrontDoor | None = None
        self._reading: asyncio.Task[None] | None = None

    def wait(self, missing: str) -> None:
        """Says what is waited for."""
        self._waiting = missing

    def serves(self, door: FrontDoor, reading: asyncio.Task[None]) -> None:
        """From now on the door knows."""
        self._door, self._reading = door, reading

    def __call__(self) -> str | None:
        if self._door is None or self._reading is None:
            return self._waiting
        if self._door.draining:
            return "stopping"
        return "the log isn't read" if self._reading.done() else self._door.producer.failure


async def run(settings: BridgeSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then let calls end for at most `drain_ms`. Raises HeadraceError if it can't start or goes on no more."""
    async with AsyncExitStack() as stack:
        # Nobody may connect before somebody answers, but a port that is taken is told of at once.
        ports.require_free(settings.port, settings.host, PURPOSE)
        if settings.grpc_port:
            ports.require_free(settings.grpc_port, settings.host, GRPC_PURPOSE)
        ready = _Readiness()
        ops = OpsServer(settings.ops_port, ready)
        await ops.start()
        stack.push_async_callback(ops.stop)
        if not await until_reached(settings.kafka, TOPICS, stop, ready.wait):
            return
        ready.wait("the directories aren't read yet")
        door, reading = await _open_door(settings, stack)
        listener = ports.bind(settings.port, settings.host, PURPOSE)
        stack.callback(listener.close)
        ready.serves(door, reading)
        drain_s = min(settings.drain_ms / 1000, DRAIN_MAX_S)
        server = make_server(make_app(door, ready), settings.body_bytes_max + WS_ENVELOPE_BYTES, drain_s)
        calls = await _serve_grpc(settings, door, ready)
        revoking = asyncio.create_task(door.end_the_revoked(), name="revocations")
        present = asyncio.create_task(door.presence.run(), name="presence")
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        host, port = listener.getsockname()[:2]
        _log.info("serving", host=host, port=port)
        try:
            await asyncio.wait({serving, stopping, reading, revoking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            door.draining = True
            server.should_exit = True
            stopping.cancel()
            revoking.cancel()
            ending = asyncio.ensure_future(calls.stop(drain_s)) if calls is not None else None
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            if ending is not None:
                await ending
            await door.stop()
            present.cancel()
        if reading.done():
            reading.result()


async def _serve_grpc(settings: BridgeSettings, door: FrontDoor, ready: _Readiness) -> GrpcServer | None:
    if not settings.grpc_port:
        return None
    from bridge.inference.grpc_server import GrpcServer

    server = GrpcServer(door, ready)
    port = await server.start(settings.host, settings.grpc_port)
    _log.info("serving gRPC", host=settings.host, port=port)
    return server


async def _open_door(settings: BridgeSettings, stack: AsyncExitStack) -> tuple[FrontDoor, asyncio.Task[None]]:
    """Everything behind the endpoints, started; the stack ends it. The task reads tokens and ends only by an error."""
    payloads = Payloads.of(settings)
    stack.push_async_callback(payloads.close)
    producer = EventProducer(settings.kafka, PROCESS, payloads, gather=True)
    await producer.start()
    stack.push_async_callback(producer.stop)
    tenants, models = TenantDirectory(settings.kafka), ModelDirectory(settings.kafka)
    workers = WorkerDirectory(settings.kafka)
    for directory in (tenants, models, workers):
        await directory.start()
        stack.push_async_callback(directory.stop)
    partition = await reply_partition(settings.kafka, settings.instance)
    decoder = EventDecoder(settings.kafka, payloads)
    dispatcher = Dispatcher(settings.kafka, partition, decoder)
    reading = await dispatcher.start()
    stack.push_async_callback(dispatcher.stop)
    secret = settings.grant_secret or read_grant_secret(settings.data_dir)
    auth = Authenticator(tenants, secret, Reply(TOKENS, partition), settings.grant_ttl_ms)
    resumes = Resumes(settings, dispatcher, decoder, EventIds(secret), auth.reply_of)
    Joins(dispatcher, resumes)
    stack.push_async_callback(resumes.stop)
    return FrontDoor(settings, auth, models, workers, producer, dispatcher, resumes), reading
