"""How late a caller hears that its deadline has passed while no worker takes its request.

A model without workers is asked; each call gives a timeout of a second. Late is what lies between the end of that second, from when the
call was sent, and the whole answer of 504. The peer is what services do without a server that keeps deadlines: a timer around the call in
the caller's own process, so that nothing behind it knows that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import aiohttp
import orjson

from bench.load import now_s
from bench.rows import Row, conditions, quantile_rows, show, tell_worst
from bench.stack import private_stack
from cli.context import console
from infra.models_file import ModelEntry
from schemas.errors import HeadraceError
from schemas.reasons import Reason

PEER = "a timer in the caller"
MODEL = "scripted"
CONTEXT = 8192
TIMEOUT_MS = 1_000
CALLS = {1: 20, 64: 640, 256: 2_560}
"""Calls by concurrency."""
QUICK_SHARE = 10
SPREAD_S = 1.0
"""Callers begin within this time, so that their deadlines do not fall together."""
LATE = 504
AIM_P99_MS = 100.0


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. `quick` makes a tenth of the calls. Raises HeadraceError if a call is answered in any other way."""
    before = conditions()
    rows: list[Row] = []
    model = ModelEntry(MODEL, "1", "scripted", "scripted", CONTEXT, workers=0)
    async with (
        private_stack((model,)) as stack,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"Authorization": f"Bearer {stack.key}"}
        ) as session,
    ):
        for concurrency, full in CALLS.items():
            calls = max(concurrency, full // QUICK_SHARE) if quick else full
            theirs = await _all(concurrency, calls, _timer)
            ours = await _all(concurrency, calls, _Asker(session, stack.url))
            console(stderr=True).print(f"headrace: {concurrency} at once: {calls} calls done")
            rows += quantile_rows("deadline_late", concurrency, ours, PEER, theirs)
    show(rows, as_json=as_json, title=f"How late a caller hears of a deadline that passed ({before})")
    tell_worst(rows, AIM_P99_MS)
    return 0


class _Asker:
    """Asks the front door, and waits for its 504."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"

    async def __call__(self) -> None:
        body = orjson.dumps({"model": MODEL, "prompt": "hello", "timeout": TIMEOUT_MS / 1000})
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as answer:
            text = await answer.text()
            if answer.status != LATE:
                raise HeadraceError(Reason.UNAVAILABLE, f"a call was answered with {answer.status}: {text[:200]}")


async def _timer() -> None:
    try:
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            await asyncio.Event().wait()
    except TimeoutError:
        pass


async def _all(concurrency: int, calls: int, ask: Callable[[], Awaitable[None]]) -> list[float]:
    """How late each call ended, in ms, by as many callers."""
    late_ms: list[float] = []
    left = iter(range(calls))

    async def caller() -> None:
        await asyncio.sleep(random.uniform(0, SPREAD_S))
        for _ in left:
            began_s = now_s()
            await ask()
            late_ms.append((now_s() - began_s) * 1000 - TIMEOUT_MS)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(caller())
    return late_ms
