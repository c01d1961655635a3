"""How soon a revoked key is refused, and what it has open ends.

In each round a new key has streams, also by gRPC, and a socket open, asks two front doors over and over, and writes requests straight to the log;
then it is revoked. What is measured runs from the record that says so to the first call that is refused, to the end of what was open, and to the first
request on the log of which its writer hears that it was refused. The peer is the least that this can take: a consumer of the same topic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import grpc
import grpc.aio
import orjson

from bench.direct import Direct, direct
from bench.rows import Row, conditions, quantile_rows, show, tell_worst
from bench.scripted import CONTEXT, MODEL, opened, read_to_end
from bench.stack import private_stack
from bridge.calls import new_request_id
from bridge.inference.messages import SERVICE, message
from cli.registry import DEFAULT_TIERS, add_key, new_key, new_tenant, now_ms, read_tenant, revoke_key, write_tenant
from cli.stack import Stack
from infra.kafka import make_consumer
from infra.log import EventDecoder
from infra.models_file import ModelEntry
from infra.ports import free_port
from schemas.errors import HeadraceError
from schemas.events import InferenceRejected, InferenceRequested, Sampling, TenantChanged
from schemas.reasons import Reason
from schemas.topics import TENANTS

PEER = "a consumer of tenants"
TENANT = "leaver"
LONG: dict[str, object] = {"tokens": ["x"], "repeat": 6_000, "token_ms": 200}
SHORT: dict[str, object] = {"tokens": ["y"]}
ROUNDS, QUICK_ROUNDS, WARM_UP_ROUNDS = 30, 3, 2
ASKED_EVERY_S = 0.02
START_S, KNOWN_S_MAX, REFUSED_S_MAX = 60.0, 30.0, 30.0
AIM_P99_MS = 2_000.0

Inferred = grpc.aio.StreamStreamCall[bytes, bytes]
Watch = Callable[[], Awaitable[None]]
"""Returns once a revoked key has met its end in one way."""


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. Raises HeadraceError if a key isn't refused at all."""
    before = conditions()
    model = ModelEntry(MODEL, "1", "scripted", "scripted", CONTEXT, slots=64, partitions=1)
    found: dict[str, list[float]] = {}
    async with private_stack((model,)) as stack:
        await write_tenant(stack.kafka, new_tenant(TENANT, now_ms()))
        port = free_port()
        await stack.supervisor.start(stack.bridge_spec("bridge-2", port))
        await stack.supervisor.ready("bridge-2", START_S)
        doors = stack.url, f"http://127.0.0.1:{port}"
        for number in range(WARM_UP_ROUNDS + (QUICK_ROUNDS if quick else ROUNDS)):
            took = await _round(stack, doors)
            if number >= WARM_UP_ROUNDS:
                for way, ms in took.items():
                    found.setdefault(way, []).append(ms)
    theirs = found.pop(PEER)
    rows: list[Row] = []
    for way, ours in found.items():
        rows += quantile_rows("refused", way, ours, PEER, theirs)
    show(rows, as_json=as_json, title=f"How soon a revoked key is refused ({before})")
    tell_worst(rows, AIM_P99_MS)
    return 0


async def _round(stack: Stack, doors: tuple[str, str]) -> dict[str, float]:
    """One key's end: by way, the ms from the record that revokes it."""
    key, kept = new_key(DEFAULT_TIERS, now_ms())
    await write_tenant(stack.kafka, add_key(await read_tenant(stack.kafka, TENANT), kept))
    headers = {"Authorization": f"Bearer {key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        direct(stack, TENANT, kept.key_id) as producer,
        _generated(stack.grpc_address, key) as generated,
        _revoked_heard(stack, kept.key_id) as heard,
    ):
        for door in doors:
            await _until_status(session, door, 200)
        answer = await opened(session, stack.url, LONG)
        socket = await session.ws_connect(f"{stack.url}/v1/stream")
        ways: dict[str, Watch] = {
            "new call": lambda: _until_status(session, doors[0], 401),
            "new call, second front door": lambda: _until_status(session, doors[1], 401),
            "open stream": lambda: read_to_end(answer),
            "open gRPC stream": lambda: _ended(generated),
            "open socket": lambda: _closed(socket),
            "direct record": lambda: _refused(producer),
        }
        ended = {way: asyncio.create_task(_timed(watch)) for way, watch in ways.items()}
        await write_tenant(stack.kafka, revoke_key(await read_tenant(stack.kafka, TENANT), kept.key_id, now_ms()))
        told_ms, heard_ms = await heard
        took = {way: await task - told_ms for way, task in ended.items()}
        answer.close()
    return {PEER: heard_ms - told_ms, **took}


async def _timed(watch: Watch) -> float:
    """When it ended, in ms since 1970, as records have it."""
    try:
        async with asyncio.timeout(REFUSED_S_MAX):
            await watch()
    except TimeoutError:
        raise HeadraceError(Reason.UNAVAILABLE, "a revoked key was not refused") from None
    return time.time() * 1000


async def _until_status(session: aiohttp.ClientSession, door: str, status: int) -> None:
    async with asyncio.timeout(KNOWN_S_MAX):
        while True:
            async with session.get(f"{door}/v1/models") as answer:
                if answer.status == status:
                    return
            await asyncio.sleep(ASKED_EVERY_S)


@asynccontextmanager
async def _generated(address: str, key: str) -> AsyncIterator[Inferred]:
    """A stream of answers that has begun."""
    text = orjson.dumps(LONG)
    asked = message("ModelInferRequest")(model_name=MODEL)
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    asked.inputs.add(name="stream", datatype="BOOL", shape=[1])
    asked.raw_input_contents.extend((len(text).to_bytes(4, "little") + text, b"\x01"))
    async with grpc.aio.insecure_channel(address) as channel:
        infer: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        call = infer(metadata=(("authorization", f"Bearer {key}"),))
        await call.write(asked.SerializeToString())
        async with asyncio.timeout(KNOWN_S_MAX):
            await call.read()
        yield call
        call.cancel()


async def _ended(call: Inferred) -> None:
    """Reads to its end, which is the key's."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    if (status := await call.code()) is not grpc.StatusCode.UNAUTHENTICATED:
        raise HeadraceError(Reason.UNAVAILABLE, f"a gRPC stream ended with {status.name} before its key was revoked")


async def _closed(socket: aiohttp.ClientWebSocketResponse) -> None:
    while not (await socket.receive()).type.name.startswith("CLOS"):
        pass


async def _refused(producer: Direct) -> None:
    """Writes requests until one is refused."""
    prompt = orjson.dumps(SHORT).decode()

    async def ask() -> None:
        while True:
            await producer.send(
                InferenceRequested(new_request_id(), MODEL, prompt=prompt, sampling=Sampling(max_tokens=1))
            )
            await asyncio.sleep(ASKED_EVERY_S)

    asking = asyncio.create_task(ask())
    try:
        await producer.until(lambda event: isinstance(event, InferenceRejected) and event.tenant == producer.tenant)
    finally:
        asking.cancel()


@asynccontextmanager
async def _revoked_heard(stack: Stack, key_id: str) -> AsyncIterator[asyncio.Task[tuple[float, float]]]:
    """The peer: when the record stood in the log that revokes a key, and when it was heard of; in ms since 1970."""
    consumer, decoder = make_consumer(stack.kafka, TENANTS, auto_offset_reset="latest"), EventDecoder(stack.kafka)
    await consumer.start()
    await consumer.seek_to_end()

    async def listen() -> tuple[float, float]:
        while True:
            record = await consumer.getone()
            event = await decoder.decode(record.value)
            if isinstance(event, TenantChanged):
                revoked = {key.key_id for key in event.keys if key.revoked_ms is not None}
                if key_id in revoked:
                    return record.timestamp, time.time() * 1000

    listening = asyncio.create_task(listen())
    try:
        yield listening
    finally:
        listening.cancel()
        await consumer.stop()
