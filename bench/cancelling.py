"""How soon a call that is cancelled has stopped in its engine.

A worker has one slot. A caller streams an answer of minutes, another call waits for the slot; then the first is cancelled: by DELETE, by a
closed connection, by a message on its WebSocket, or by a direct producer's record. What is measured runs from there to the other's first text:
by then the engine made no more, the slot was free, and the next call had begun. The peer is the least that this can take: the engine
and a lock in the caller's own process, where a task is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import aiohttp
import orjson

from bench.direct import Direct, direct
from bench.load import Client, now_s
from bench.rows import Row, conditions, quantile_rows, show, tell_worst
from bench.scripted import CONTEXT, MODEL, body, opened
from bench.stack import private_stack
from bridge.calls import new_request_id
from cli.context import console
from cli.stack import TENANT, Stack
from infra.models_file import ModelEntry
from schemas.errors import HeadraceError
from schemas.events import InferenceCancelled, InferenceRequested, Sampling, TokensGenerated
from schemas.reasons import Reason
from workers.engines.port import EngineConfig, EngineRequest
from workers.engines.scripted import ScriptedEngine

PEER = "a task cancelled in the caller"
LONG: dict[str, object] = {"tokens": ["x"], "repeat": 6_000, "token_ms": 20}
NEXT: dict[str, object] = {"tokens": ["y"]}
CALLS, QUICK_CALLS, WARM_UP_CALLS = 100, 5, 5
QUEUED_S = 0.3
"""So long the next call has waited when the first is cancelled: it stands before the worker."""
AIM_P99_MS = 1_000.0

Once = Callable[[], Awaitable[float]]
"""Cancels one call; the ms until the next has its first text."""
Cancel = Callable[[], Awaitable[None]]
Running = Callable[[], AbstractAsyncContextManager[Cancel]]
"""Has a call that runs, and gives how to cancel it."""


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. Raises HeadraceError if a call fails."""
    before, calls = conditions(), QUICK_CALLS if quick else CALLS
    theirs = [await _in_process() for _ in range(calls)]
    model = ModelEntry(MODEL, "1", "scripted", "scripted", CONTEXT, slots=1, partitions=1)
    rows: list[Row] = []
    async with (
        private_stack((model,)) as stack,
        Client(f"{stack.url}/v1/completions", stack.key) as client,
        direct(stack, TENANT) as producer,
    ):
        ways = {
            "DELETE": _over_http(stack, closes=False),
            "closed connection": _over_http(stack, closes=True),
            "message on a socket": _on_a_socket(stack),
            "record": _by_record(producer),
        }
        for way, running in ways.items():
            once = _once(client, running)
            for _ in range(WARM_UP_CALLS):
                await once()
            ours = [await once() for _ in range(calls)]
            console(stderr=True).print(f"headrace: {way}: {calls} calls cancelled")
            rows += quantile_rows("cancelled", way, ours, PEER, theirs)
    show(rows, as_json=as_json, title=f"How soon a cancelled call's slot serves the next ({before})")
    tell_worst(rows, AIM_P99_MS)
    return 0


def _once(client: Client, running: Running) -> Once:
    async def once() -> float:
        async with running() as cancel:
            following = asyncio.create_task(client.call(body(NEXT)))
            await asyncio.sleep(QUEUED_S)
            cancelled_s = now_s()
            await cancel()
            sample = await following
        if sample.error is not None or sample.first_s is None:
            raise HeadraceError(Reason.UNAVAILABLE, f"the next call failed: {sample.error}")
        return (sample.first_s - cancelled_s) * 1000

    return once


def _over_http(stack: Stack, *, closes: bool) -> Running:
    headers = {"Authorization": f"Bearer {stack.key}", "content-type": "application/json"}

    @asynccontextmanager
    async def running() -> AsyncIterator[Cancel]:
        async with aiohttp.ClientSession(headers=headers) as session:
            answer = await opened(session, stack.url, LONG)

            async def cancel() -> None:
                if closes:
                    answer.close()
                    return
                async with session.delete(f"{stack.url}/v1/streams/{answer.headers['x-request-id']}") as told:
                    told.raise_for_status()

            yield cancel
            answer.close()

    return running


def _on_a_socket(stack: Stack) -> Running:
    headers = {"Authorization": f"Bearer {stack.key}"}

    @asynccontextmanager
    async def running() -> AsyncIterator[Cancel]:
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.ws_connect(f"{stack.url}/v1/stream") as socket,
        ):
            asked = {"type": "request", "id": "1", "endpoint": "completions", "body": orjson.loads(body(LONG))}
            await socket.send_json(asked)
            while (message := await socket.receive_json())["type"] != "chunk":
                if message["type"] == "error":
                    raise HeadraceError(Reason.UNAVAILABLE, f"a call failed before it was cancelled: {message}")

            yield lambda: socket.send_json({"type": "cancel", "id": "1"})

    return running


def _by_record(producer: Direct) -> Running:
    @asynccontextmanager
    async def running() -> AsyncIterator[Cancel]:
        asked = orjson.loads(body(LONG))
        sampling = Sampling(max_tokens=asked["max_tokens"])
        request = InferenceRequested(new_request_id(), MODEL, prompt=asked["prompt"], sampling=sampling)
        await producer.send(request)
        await producer.until(
            lambda event: isinstance(event, TokensGenerated) and event.request_id == request.request_id
        )
        yield lambda: producer.send(InferenceCancelled(request.request_id, producer.tenant))

    return running


async def _in_process() -> float:
    """The peer's."""
    engine, slot = ScriptedEngine(EngineConfig(MODEL, "scripted", CONTEXT, 1)), asyncio.Lock()

    async def call(script: dict[str, object], begun: asyncio.Event) -> None:
        async with (
            slot,
            aclosing(engine.generate(EngineRequest(str(script), tuple(orjson.dumps(script)), Sampling()))) as made,
        ):
            async for _ in made:
                begun.set()

    began, next_began = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(call(LONG, began))
    await began.wait()
    following = asyncio.create_task(call(NEXT, next_began))
    await asyncio.sleep(QUEUED_S)
    cancelled_s = now_s()
    first.cancel()
    await next_began.wait()
    took_ms = (now_s() - cancelled_s) * 1000
    await asyncio.gather(first, following, return_exceptions=True)
    return took_ms
