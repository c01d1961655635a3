"""What the way through HTTP and Kafka adds to the time to first token, and at which hop.

The scripted engine answers the same prompt by the same script twice: called in this process through its port, and through the whole path
(front door, admission, worker, and back). The script stands for a language model that is fast: a first token after 20 ms, 16 tokens
20 ms apart. `added` is a quantile of the whole path's time to first token less the same quantile of the direct call's.

With no engine time at all, which `saturated_…` shows, callers ask again at once, and the figure says how many calls a second the
machine carries rather than how long one takes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass

import orjson

from bench.hops import HOPS, Hops
from bench.load import Client, Result, Sample, closed_loop, now_s
from bench.rows import Row, conditions, row, show
from bench.stack import private_stack
from cli.context import console, table
from infra.models_file import ModelEntry
from schemas.events import Sampling
from schemas.topics import INTERACTIVE, work_topic
from workers.engines.port import EngineConfig, EngineRequest
from workers.engines.scripted import ScriptedEngine

PEER = "in-process engine"
MODEL = "scripted"
VERSION = "1"
WORK = work_topic(MODEL, VERSION, INTERACTIVE)
CONTEXT = 8192
CALLS = {1: 200, 16: 800, 64: 1_600}
"""Calls by concurrency."""
QUICK_SHARE = 10
WARM_UP_CALLS, QUICK_WARM_UP_CALLS = 1_500, 200
"""Until the broker's Java has compiled what it runs: before that a call costs it three times as much."""
WARM_UP_CONCURRENCY = 16
TOKENS = 16
PACED: dict[str, object] = {"tokens": ["abcd"[n % 4] for n in range(TOKENS)], "first_token_ms": 20, "token_ms": 20}
SATURATED: dict[str, object] = {"tokens": ["abcd"[n % 4] for n in range(TOKENS)]}
SCRIPTS: dict[str, dict[str, object]] = {"": PACED, "saturated_": SATURATED}
AIM_P50_MS = {1: 10.0, 16: 15.0}


@dataclass(frozen=True, slots=True)
class Measured:
    """One concurrency of one script: the direct calls, the calls through the whole path, and the mean time at each hop in ms."""

    direct: Result
    ours: Result
    hops_ms: tuple[float, ...]


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. `quick` makes a tenth of the calls. Raises HeadraceError if a call fails."""
    out = console(stderr=True)
    before = conditions()
    found: dict[tuple[str, int], Measured] = {}
    model = ModelEntry(MODEL, VERSION, "scripted", "scripted", CONTEXT, slots=max(CALLS))
    async with private_stack((model,)) as stack, Client(f"{stack.url}/v1/chat/completions", stack.key) as client:
        warm, warm_calls = _body(SATURATED), QUICK_WARM_UP_CALLS if quick else WARM_UP_CALLS
        (await closed_loop(client, WARM_UP_CONCURRENCY, warm_calls, lambda _: warm)).require_good()
        for prefix, script in SCRIPTS.items():
            for concurrency, full in CALLS.items():
                calls = max(concurrency, full // QUICK_SHARE) if quick else full
                found[prefix, concurrency] = await _measure(
                    client, Hops(stack.kafka, (WORK,)), script, concurrency, calls
                )
                out.print(f"headrace: {prefix or 'paced_'}{concurrency}: {calls} calls done")
    if not as_json:
        _show_hops(found)
    show(_rows(found), as_json=as_json, title=f"Overhead of the whole path over an engine called directly ({before})")
    _judge(found)
    return 0


async def _measure(client: Client, hops: Hops, script: dict[str, object], concurrency: int, calls: int) -> Measured:
    """Direct calls first, while the stack idles; half as many, since they differ little."""
    direct = await _direct(script, concurrency, max(concurrency, calls // 2))
    body = _body(script)
    await hops.begin()
    ours = (await closed_loop(client, concurrency, calls, lambda _: body)).require_good()
    return Measured(direct, ours, await hops.mean_ms(ours.good))


def _body(script: dict[str, object]) -> bytes:
    """A chat whose last message is the script."""
    messages = [{"role": "user", "content": orjson.dumps(script).decode()}]
    options = {"include_usage": True}
    return orjson.dumps({"model": MODEL, "messages": messages, "stream": True, "stream_options": options})


async def _direct(script: dict[str, object], concurrency: int, calls: int) -> Result:
    """The closed loop over the engine's own port."""
    engine = ScriptedEngine(EngineConfig(MODEL, "scripted", CONTEXT, max(CALLS)))
    await engine.start()
    result = Result(concurrency)
    prompt = tuple(orjson.dumps(script))
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            sample = Sample(now_s())
            async with aclosing(engine.generate(EngineRequest(str(number), prompt, Sampling()))) as chunks:
                async for chunk in chunks:
                    sample.last_s = now_s()
                    sample.first_s = sample.first_s or sample.last_s
                    sample.tokens += len(chunk.token_ids)
            result.samples.append(sample)

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(caller())
    result.wall_s = time.monotonic() - began_s
    await engine.shutdown()
    return result


def _rows(found: dict[tuple[str, int], Measured]) -> list[Row]:
    rows = []
    for (prefix, concurrency), measured in found.items():
        for name, quantile in (("p50", 0.5), ("p99", 0.99)):
            theirs = measured.direct.ttft_ms(quantile)
            added = measured.ours.ttft_ms(quantile) - theirs
            rows.append(row(f"{prefix}added_ttft_{name}_ms", "ms", concurrency, added, PEER, theirs))
    return rows


def _show_hops(found: dict[tuple[str, int], Measured]) -> None:
    """Where the time goes: the mean of each hop."""
    columns = [f">{prefix}{concurrency}" for prefix, concurrency in found]
    shown = table("hop, mean ms at", *columns, title="Where the time to first token goes (the engine's own included)")
    for place, hop in enumerate(HOPS):
        shown.add_row(hop, *(f"{measured.hops_ms[place]:.2f}" for measured in found.values()))
    means = [sum(s.ttft_ms for s in measured.ours.good) / len(measured.ours.good) for measured in found.values()]
    shown.add_row("all of it, as the caller sees it", *(f"{mean:.2f}" for mean in means))
    shown.add_row("calls a second", *(f"{len(m.ours.good) / m.ours.wall_s:.0f}" for m in found.values()))
    console().print(shown)


def _judge(found: dict[tuple[str, int], Measured]) -> None:
    """Says on standard error which aim was met."""
    for concurrency, aim_ms in AIM_P50_MS.items():
        measured = found["", concurrency]
        added = measured.ours.ttft_ms(0.5) - measured.direct.ttft_ms(0.5)
        verdict = "met" if added < aim_ms else "missed"
        console(stderr=True).print(f"aim: p50 under {aim_ms:.0f} ms at {concurrency}: {verdict} ({added:.1f} ms)")
