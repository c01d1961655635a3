"""How late a caller hears that its deadline has passed while no worker takes its request: there is none, or it is busy, or stopped.

Each call gives a timeout of a second. The one slot of the busy worker has an answer that takes minutes; the stopped one has it as well. Late is what lies between the end of that second, from when the
call was sent, and the whole answer of 504. The peer is what services do without a server that keeps deadlines: a timer around the call in
the caller's own process, so that nothing behind it knows that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import orjson
import psutil

from bench.load import now_s
from bench.rows import Row, conditions, quantile_rows, show, tell_worst
from bench.stack import private_stack, stopped
from cli.context import console
from cli.stack import Stack
from infra.models_file import ModelEntry
from schemas.errors import HeadraceError
from schemas.reasons import Reason

PEER = "a timer in the caller"
ABSENT, SERVED = "absent", "served"
"""Models: one that has no worker, and one that has one."""
CONTEXT = 8192
LONG: dict[str, object] = {"tokens": ["on "], "repeat": 3_000, "token_ms": 100}
"""The answer that the worker is busy with."""
TIMEOUT_MS = 1_000
CALLS = {1: 20, 64: 640, 256: 2_560}
"""Calls by concurrency."""
AT_WORKER = 64
"""Callers at once where there is a worker. They are done before one that is stopped is taken for gone, which would be told at once."""
QUICK_SHARE = 10
SPREAD_S = 1.0
"""Callers begin within this time, so that their deadlines do not fall together."""
LATE = 504
AIM_P99_MS = 100.0


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. `quick` makes a tenth of the calls. Raises HeadraceError if a call is answered in any other way."""
    before = conditions()
    rows: list[Row] = []
    models = tuple(
        ModelEntry(name, "1", "scripted", "scripted", CONTEXT, slots=1, workers=count)
        for name, count in ((ABSENT, 0), (SERVED, 1))
    )
    async with (
        private_stack(models) as stack,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"Authorization": f"Bearer {stack.key}"}
        ) as session,
    ):
        for concurrency, full in CALLS.items():
            calls = max(concurrency, full // QUICK_SHARE) if quick else full
            theirs = await _all(concurrency, calls, _timer)
            ours = await _all(concurrency, calls, _Asker(session, stack.url, ABSENT))
            console(stderr=True).print(f"headrace: {concurrency} at once: {calls} calls done")
            rows += quantile_rows("deadline_late", concurrency, ours, PEER, theirs)
            if concurrency == AT_WORKER:
                beside = theirs, calls
        async with _busy(session, stack) as worker:
            theirs, calls = beside
            for state, halted in (("busy", ()), ("stopped", (worker,))):
                with stopped(halted):
                    ours = await _all(AT_WORKER, calls, _Asker(session, stack.url, SERVED))
                console(stderr=True).print(f"headrace: {AT_WORKER} at once, the worker {state}: {calls} calls done")
                rows += quantile_rows("deadline_late", f"{AT_WORKER}, worker {state}", ours, PEER, theirs)
    show(rows, as_json=as_json, title=f"How late a caller hears of a deadline that passed ({before})")
    tell_worst(rows, AIM_P99_MS)
    return 0


@contextlib.asynccontextmanager
async def _busy(session: aiohttp.ClientSession, stack: Stack) -> AsyncIterator[psutil.Process]:
    """The worker, which answers somebody else meanwhile."""
    prompt = orjson.dumps(LONG).decode()
    asked = {"model": SERVED, "prompt": prompt, "max_tokens": CONTEXT // 2, "stream": True, "timeout": 600}
    async with session.post(f"{stack.url}/v1/completions", json=asked) as answer:
        await answer.content.readany()  # it has begun
        (pid,) = (each.pid for each in stack.supervisor.status() if each.name.startswith(f"worker-{SERVED}"))
        yield psutil.Process(pid)


class _Asker:
    """Asks the front door, and waits for its 504."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._model = model
        self._url = f"{url}/v1/completions"

    async def __call__(self) -> None:
        body = orjson.dumps({"model": self._model, "prompt": "hello", "timeout": TIMEOUT_MS / 1000})
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
