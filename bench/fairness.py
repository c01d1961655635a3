"""What a tenant's calls suffer while another floods the same model.

One caller asks again and again, alone and then beside a tenant that keeps many more calls open than there are slots. The script stands
for a language model: a first token after 100 ms, 16 tokens 50 ms apart. The peer is what a server does that knows no tenants: as many
slots, and one queue for all in the order in which they come, the engine called in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import orjson

from bench.load import Client, percentile
from bench.rows import Row, conditions, quantile_rows, row, show, tell_aim
from bench.stack import private_stack
from cli.context import console
from cli.registry import DEFAULT_TIERS, add_key, new_key, new_tenant, now_ms, write_tenant
from infra.models_file import ModelEntry
from schemas.errors import HeadraceError
from schemas.events import Sampling
from schemas.reasons import Reason
from workers.engines.port import EngineConfig, EngineRequest
from workers.engines.scripted import ScriptedEngine

PEER = "one queue for all"
MODEL, CONTEXT, SLOTS = "scripted", 8192, 32
SCRIPT: dict[str, object] = {"tokens": ["abcd"[n % 4] for n in range(16)], "first_token_ms": 100, "token_ms": 50}
FLOOD = 256
"""Calls that the flooding tenant keeps open."""
CALLS, QUICK_CALLS, WARM_UP_CALLS = 60, 8, 20
PEERS_CALLS = 20
"""Beside a flood each of the peer's takes seconds."""
FLOODED_S = 5.0
"""How long the flood has gone on before anything is measured."""
QUANTILES = (("p50", 0.5), ("p95", 0.95))
AIM_RATIO = 1.5

Ask = Callable[[], Awaitable[float]]
"""Makes a call; its time to first token in ms."""
Times = tuple[list[float], list[float]]
"""Times to first token alone, and beside a flood."""


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. Raises HeadraceError if a call of the quiet tenant fails."""
    before, calls = conditions(), QUICK_CALLS if quick else CALLS
    theirs = await _measure(_Queue().ask, min(calls, PEERS_CALLS))
    model = ModelEntry(MODEL, "1", "scripted", "scripted", CONTEXT, slots=SLOTS)
    async with private_stack((model,)) as stack:
        key, kept = new_key(DEFAULT_TIERS, now_ms())
        await write_tenant(stack.kafka, add_key(new_tenant("flood", now_ms()), kept))
        url = f"{stack.url}/v1/chat/completions"
        async with Client(url, stack.key) as quiet, Client(url, key) as flood:
            for _ in range(WARM_UP_CALLS):
                await _asker(quiet)()
            ours = await _measure(_asker(quiet), calls, _asker(flood))
    rows = _rows(ours, theirs)
    show(rows, as_json=as_json, title=f"A tenant's time to first token while another floods ({before})")
    tell_aim(rows[-1], AIM_RATIO)
    return 0


def _rows(ours: Times, theirs: Times) -> list[Row]:
    """What was measured; the last says by how much a flood makes the p95 longer."""
    rows: list[Row] = []
    for quantile in QUANTILES:
        for index, at in enumerate(("quiet", f"flood of {FLOOD}")):
            rows += quantile_rows("ttft", at, ours[index], PEER, theirs[index], (quantile,))
    slower = [percentile(crowded, 0.95) / percentile(alone, 0.95) for alone, crowded in (ours, theirs)]
    return [*rows, row("ttft_p95_flooded_to_quiet", "times", f"flood of {FLOOD}", slower[0], PEER, slower[1])]


async def _measure(ask: Ask, calls: int, flood: Ask | None = None) -> Times:
    """Asks in both cases."""
    alone = [await ask() for _ in range(calls)]
    flooding = [asyncio.create_task(_again(flood or ask)) for _ in range(FLOOD)]
    try:
        await asyncio.sleep(FLOODED_S)
        beside = [await ask() for _ in range(calls)]
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    console(stderr=True).print(f"{'headrace' if flood else PEER}: {2 * calls} calls done")
    return alone, beside


async def _again(ask: Ask) -> None:
    while True:
        with suppress(HeadraceError):  # its own flood may be refused
            await ask()


def _asker(client: Client) -> Ask:
    body = orjson.dumps(
        {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": orjson.dumps(SCRIPT).decode()}]}
    )

    async def ask() -> float:
        sample = await client.call(body)
        if sample.error is not None:
            raise HeadraceError(Reason.UNAVAILABLE, f"a call failed: {sample.error}")
        return sample.ttft_ms

    return ask


class _Queue:
    """The peer."""

    def __init__(self) -> None:
        self._engine = ScriptedEngine(EngineConfig(MODEL, "scripted", CONTEXT, SLOTS))
        self._slots = asyncio.Semaphore(SLOTS)
        self._made = 0

    async def ask(self) -> float:
        """A call by whoever."""
        began_s, first_s = time.monotonic(), None
        prompt = tuple(orjson.dumps(SCRIPT))
        self._made += 1
        name = str(self._made)
        async with (
            self._slots,
            aclosing(self._engine.generate(EngineRequest(name, prompt, Sampling()))) as chunks,
        ):
            async for _ in chunks:
                first_s = first_s or time.monotonic()
        assert first_s is not None
        return (first_s - began_s) * 1000
