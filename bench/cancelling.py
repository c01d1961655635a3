"""How soon a call that is cancelled has stopped in its engine.

A worker has one slot. A caller streams an answer of minutes, another call waits for the slot; then the first is cancelled, by DELETE or by a
closed connection. What is measured runs from there to the other's first text: by then the engine made no more, the slot was free, and the next
call had begun. The peer is the least that this can take: the engine and a lock in the caller's own process, where a task is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import aiohttp
import orjson

from bench.load import Client, now_s
from bench.rows import Row, conditions, quantile_rows, show, tell_worst
from bench.stack import private_stack
from cli.context import console
from infra.models_file import ModelEntry
from schemas.errors import HeadraceError
from schemas.events import Sampling
from schemas.reasons import Reason
from workers.engines.port import EngineConfig, EngineRequest
from workers.engines.scripted import ScriptedEngine

PEER = "a task cancelled in the caller"
MODEL, CONTEXT = "scripted", 8192
LONG: dict[str, object] = {"tokens": ["x"], "repeat": 6_000, "token_ms": 20}
NEXT: dict[str, object] = {"tokens": ["y"]}
CALLS, QUICK_CALLS, WARM_UP_CALLS = 100, 5, 5
QUEUED_S = 0.3
"""So long the next call has waited when the first is cancelled: it stands before the worker."""
DELETED, CLOSED = "DELETE", "closed connection"
AIM_P99_MS = 1_000.0

Once = Callable[[], Awaitable[float]]
"""Cancels one call; the ms until the next has its first text."""


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. Raises HeadraceError if a call fails."""
    before, calls = conditions(), QUICK_CALLS if quick else CALLS
    theirs = [await _in_process() for _ in range(calls)]
    model = ModelEntry(MODEL, "1", "scripted", "scripted", CONTEXT, slots=1, partitions=1)
    rows: list[Row] = []
    async with private_stack((model,)) as stack, Client(f"{stack.url}/v1/completions", stack.key) as client:
        for way in (DELETED, CLOSED):
            once = _way(client, stack.url, stack.key, way)
            for _ in range(WARM_UP_CALLS):
                await once()
            ours = [await once() for _ in range(calls)]
            console(stderr=True).print(f"headrace: {way}: {calls} calls cancelled")
            rows += quantile_rows("cancelled", way, ours, PEER, theirs)
    show(rows, as_json=as_json, title=f"How soon a cancelled call's slot serves the next ({before})")
    tell_worst(rows, AIM_P99_MS)
    return 0


def _body(script: dict[str, object]) -> bytes:
    prompt = orjson.dumps(script).decode()
    return orjson.dumps({"model": MODEL, "stream": True, "prompt": prompt, "max_tokens": CONTEXT - len(prompt)})


def _way(client: Client, url: str, key: str, way: str) -> Once:
    headers = {"Authorization": f"Bearer {key}", "content-type": "application/json"}

    async def once() -> float:
        async with aiohttp.ClientSession(headers=headers) as session:
            answer = await session.post(f"{url}/v1/completions", data=_body(LONG))
            while b'"text":"x' not in (line := await answer.content.readline()):
                if not line:
                    raise HeadraceError(
                        Reason.UNAVAILABLE, f"a call ended with {answer.status} before it was cancelled"
                    )
            following = asyncio.create_task(client.call(_body(NEXT)))
            await asyncio.sleep(QUEUED_S)
            cancelled_s = now_s()
            if way == CLOSED:
                answer.close()
            else:
                async with session.delete(f"{url}/v1/streams/{answer.headers['x-request-id']}") as told:
                    told.raise_for_status()
            sample = await following
            answer.close()
        if sample.error is not None or sample.first_s is None:
            raise HeadraceError(Reason.UNAVAILABLE, f"the next call failed: {sample.error}")
        return (sample.first_s - cancelled_s) * 1000

    return once


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
