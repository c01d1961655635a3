"""How soon a call that is cancelled has stopped in its engine: in one that does nothing else, and in vLLM.

A worker has one slot. A caller streams an answer of minutes, another call waits for the slot; then the first is cancelled: by DELETE, by a
closed connection, by a message on its WebSocket, or by a direct producer's record. What is measured runs from there to the other's first text:
by then the engine made no more, the slot was free, and the next call had begun. The peer is the least that this can take: the engine
and a lock in the caller's own process, where a task is cancelled. With a real language model it is `vllm serve`, with one sequence at a
time, whose only way is a closed connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import aiohttp
import orjson

from bench.direct import Direct, direct
from bench.llm import ENV, vllm_serve
from bench.llm import PEER as VLLM
from bench.load import Client, now_s
from bench.rows import Row, conditions, quantile_rows, show, tell_worst
from bench.scripted import CONTEXT, MODEL, begun, body
from bench.stack import private_stack
from bridge.calls import new_request_id
from cli.context import console, data_dir
from cli.stack import TENANT, Stack
from infra.artifacts import ensure_demo_model
from infra.models_file import ModelEntry, default_models
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
LLM_CALLS, LLM_TOKENS = 30, 1_500
STORY = "The headrace leads the water from the weir to the"

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
            "DELETE": _over_http(stack.url, stack.key, body(LONG), closes=False),
            "closed connection": _over_http(stack.url, stack.key, body(LONG), closes=True),
            "message on a socket": _on_a_socket(stack),
            "record": _by_record(producer),
        }
        for way, running in ways.items():
            once = _once(client, body(NEXT), running)
            rows += quantile_rows("cancelled", way, await _each(once, calls, f"headrace: {way}"), PEER, theirs)
    rows += await _with_vllm(QUICK_CALLS if quick else LLM_CALLS)
    show(rows, as_json=as_json, title=f"How soon a cancelled call's slot serves the next ({before})")
    tell_worst(rows, AIM_P99_MS)
    return 0


async def _each(once: Once, calls: int, who: str) -> list[float]:
    for _ in range(WARM_UP_CALLS):
        await once()
    found = [await once() for _ in range(calls)]
    console(stderr=True).print(f"{who}: {calls} calls cancelled")
    return found


async def _with_vllm(calls: int) -> list[Row]:
    """Of a real language model; ours and the peer's aren't up at the same time."""
    folder = ensure_demo_model(data_dir(), console(stderr=True).print)
    first = default_models()[0]
    name, engine, context, arguments = first.name, first.engine, first.context_length, first.engine_args
    model = ModelEntry(name, "1", engine, str(folder), context, slots=1, partitions=1, engine_args=arguments)
    long = orjson.dumps({"model": name, "prompt": STORY, "max_tokens": LLM_TOKENS, "ignore_eos": True, "stream": True})
    following = orjson.dumps({"model": name, "prompt": STORY, "max_tokens": 1, "stream": True})

    async def measure(url: str, key: str | None, who: str) -> dict[str, list[float]]:
        ways = {"DELETE": False, "closed connection": True} if key else {"closed connection": True}
        async with Client(f"{url}/v1/completions", key) as client:
            return {
                way: await _each(
                    _once(client, following, _over_http(url, key, long, closes=closes)), calls, f"{who}: {way}"
                )
                for way, closes in ways.items()
            }

    async with vllm_serve(model, folder) as peer:
        (theirs,) = (await measure(peer.url, None, VLLM)).values()
    async with private_stack((model,), ENV) as stack:
        ours = await measure(stack.url, stack.key, "headrace, vLLM")
    return [
        one for way, found in ours.items() for one in quantile_rows("cancelled", f"{way}, vLLM", found, VLLM, theirs)
    ]


def _once(client: Client, following_body: bytes, running: Running) -> Once:
    async def once() -> float:
        async with running() as cancel:
            following = asyncio.create_task(client.call(following_body))
            await asyncio.sleep(QUEUED_S)
            cancelled_s = now_s()
            await cancel()
            sample = await following
        if sample.error is not None or sample.first_s is None:
            raise HeadraceError(Reason.UNAVAILABLE, f"the next call failed: {sample.error}")
        return (sample.first_s - cancelled_s) * 1000

    return once


def _over_http(url: str, key: str | None, asked: bytes, *, closes: bool) -> Running:
    headers = {"content-type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    @asynccontextmanager
    async def running() -> AsyncIterator[Cancel]:
        async with aiohttp.ClientSession(headers=headers) as session:
            answer = await begun(session, url, asked)

            async def cancel() -> None:
                if closes:
                    answer.close()
                    return
                async with session.delete(f"{url}/v1/streams/{answer.headers['x-request-id']}") as told:
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
