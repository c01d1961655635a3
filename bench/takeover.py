"""The pause that a caller sees when the process that makes its answer dies, or is told to stop.

Two workers answer streams by the scripted engine, a token every 20 ms, each stream a text of its own. In the middle of them one worker is
killed (`crash`) or gets SIGTERM (`drain`), and is started again as `headrace up` would start it. The blows come at moments spread evenly
over an answer. A pause is a caller's longest time without new text, and every answer must be exact.

The peer is what one does without a log: two plain HTTP servers of the same engine, and a caller that asks the other one again from the
beginning when its connection breaks. Nothing has to be noticed there, but what was said already is made once more, so its pause is as
long as the answer was when the blow came: seconds here, minutes for a long answer.
"""

from __future__ import annotations

import asyncio
import random
import string
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bench.load import Client, Sample, now_s, percentile
from bench.pair import CRASH, DRAIN, Pair
from bench.pauses import Heard, Shares, Streams, owner, shares
from bench.rows import Row, conditions, row, show
from bench.stack import private_stack
from cli.context import console, table
from cli.stack import Stack
from infra.models_file import ModelEntry
from infra.ports import free_port
from infra.settings import WorkerSettings
from infra.supervisor import ChildSpec, Supervisor
from schemas.errors import HeadraceError
from schemas.reasons import Reason

PEER = "asking another replica again"
BLOWS = (CRASH, DRAIN)
MODEL, VERSION = "scripted", "1"
CONTEXT = 8192
STREAMS = 16
TOKENS, TOKEN_MS = 300, 20
"""Six seconds: long enough that callers of the other worker are still there when the struck one is back and its group shares anew."""
ROUNDS, QUICK_ROUNDS = 4, 1
"""Blows of each kind."""
DRAIN_S = 1
"""How long one that is told to stop goes on with its answers."""
FLOWING_LOOK_S = 0.01
SETTLE_S = 1.5
"""A worker reports every second; by then requests are spread over both."""
ANSWER_WAIT_S = 120.0
ID_CHARS = 36
AIM_OVER_SESSION_MS = 2_000
AIM_DRAIN_MS = 300

Ask = Callable[[int, Heard], Coroutine[Any, Any, Sample]]
"""Asks for answer number n, and returns when it is whole."""


@dataclass(slots=True)
class Found:
    """What came of the blows of one kind: the pauses in ms of the callers whose process it was, and of the others, and their parts."""

    hit_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Round:
    """One blow: every call and what its caller heard, when the blow came (s since 1970), and which life of the process it ended."""

    calls: list[tuple[Sample, Heard]]
    struck_s: float
    life: int


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. `quick` strikes once each. Raises HeadraceError if an answer fails or isn't exact."""
    before = conditions()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    theirs = await _peer(rounds)
    ours = await _ours(rounds)
    if not as_json:
        _show_shares(ours)
    show(
        _rows(ours, theirs),
        as_json=as_json,
        title=f"Pause of a caller whose process ends, {STREAMS} at once ({before})",
    )
    _judge(ours, WorkerSettings.from_env().session_timeout_ms)
    return 0


# --- a round -------------------------------------------------------------------------------------------------------------


def moment_s(number: int, rounds: int) -> float:
    """How long after the first tokens blow `number` (from 0) comes: even over an answer, with time left for a drain."""
    return (2 * number + 1) / (2 * rounds) * (TOKENS * TOKEN_MS / 1000 - DRAIN_S)


def answer_text(number: int) -> str:
    """Answer number n: letters that no other has, in no order, so that a token lost, repeated or another's shows."""
    return "".join(random.Random(number).choices(string.ascii_letters, k=TOKENS))


def _body(number: int) -> bytes:
    script = {"tokens": list(answer_text(number)), "first_token_ms": TOKEN_MS, "token_ms": TOKEN_MS}
    messages = [{"role": "user", "content": orjson.dumps(script).decode()}]
    return orjson.dumps({"model": MODEL, "messages": messages, "stream": True})


async def _round(ask: Ask, pair: Pair, blow: str, number: int, rounds: int) -> Round:
    """Asks for all answers, strikes in the middle of them, and sees them and the process through."""
    heard = [Heard() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(ask(place, each)) for place, each in enumerate(heard)]
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            await _flowing(heard, tasks)
            await asyncio.sleep(moment_s(number, rounds))
            struck_s = now_s()
            life = pair.strike(number % 2, blow)
            samples = await asyncio.gather(*tasks)
    except TimeoutError:
        raise HeadraceError(Reason.UNAVAILABLE, f"answers are not whole after {ANSWER_WAIT_S:.0f} s") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    calls = list(zip(samples, heard, strict=True))
    for place, (sample, each) in enumerate(calls):
        require_exact(sample, each, answer_text(place))
    await pair.whole()
    return Round(calls, struck_s, life)


async def _flowing(heard: list[Heard], tasks: list[asyncio.Task[Sample]]) -> None:
    """Returns when every answer has begun, or failed."""
    while True:
        if all(each.text or task.done() for each, task in zip(heard, tasks, strict=True)):
            return
        await asyncio.sleep(FLOWING_LOOK_S)


def require_exact(sample: Sample, heard: Heard, expected: str) -> None:
    """Raises HeadraceError if a caller got an error (unavailable) or another text (inconsistent_stream)."""
    if sample.error is not None:
        raise HeadraceError(Reason.UNAVAILABLE, f"a caller was not answered: {sample.error}")
    if heard.text != expected:
        text = f"an answer isn't exact: {heard.text!r} in place of {expected!r}"
        raise HeadraceError(Reason.INCONSISTENT_STREAM, text)


# --- the two sides -------------------------------------------------------------------------------------------------------


async def _ours(rounds: int) -> dict[str, Found]:
    found = {blow: Found() for blow in BLOWS}
    model = ModelEntry(MODEL, VERSION, "scripted", "scripted", CONTEXT, slots=STREAMS, workers=0)
    async with (
        private_stack((model,)) as stack,
        Pair(stack.supervisor, _worker(stack)) as pair,
        Client(f"{stack.url}/v1/chat/completions", stack.key) as client,
    ):
        streams = Streams(stack.kafka)

        async def ask(number: int, heard: Heard) -> Sample:
            return await client.call(_body(number), heard.take)

        for blow in BLOWS:
            for number in range(rounds):
                await asyncio.sleep(SETTLE_S)
                await streams.skip()
                _say("headrace", blow, number, rounds)
                await _sort(await _round(ask, pair, blow, number, rounds), streams, number % 2, found[blow])
    return found


def _worker(stack: Stack) -> Callable[[int, int], ChildSpec]:
    """The two workers of the stack, each life under a name of its own."""
    ports = [free_port(), free_port()]

    def spec(number: int, life: int) -> ChildSpec:
        env = {
            **stack.kafka.to_env(),
            "HEADRACE_DATA": str(stack.options.data_dir),
            "HEADRACE_OPS_PORT": str(ports[number]),
            "HEADRACE_WORKER_WORKER_ID": _worker_id(number, life),
            "HEADRACE_WORKER_DRAIN_MS": str(DRAIN_S * 1000),
        }
        argv = (sys.executable, "-m", "cli.main", "worker", MODEL, VERSION)
        return ChildSpec(f"worker-{number}", argv, env, ports[number], restart=False, stage=2)

    return spec


def _worker_id(number: int, life: int) -> str:
    return f"worker-{number}-{life}"


async def _sort(made: Round, streams: Streams, victim: int, found: Found) -> None:
    """Tells by the log which callers the blow hit."""
    log = await streams.read()
    for sample, heard in made.calls:
        entries = log.get(sample.request_id[-ID_CHARS:], [])
        if owner(entries, made.struck_s * 1000) != _worker_id(victim, made.life):
            found.beside_ms.append(heard.pause_ms)
            continue
        found.hit_ms.append(heard.pause_ms)
        if (parts := shares(entries)) is not None:
            found.shares.append(parts)
    if not found.hit_ms:
        raise HeadraceError(Reason.UNAVAILABLE, "the worker that was struck had no request")


async def _peer(rounds: int) -> dict[str, Found]:
    """The peer's rounds, those of both kinds at once: they wait for tokens, and leave the cores idle."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-plain-", ignore_cleanup_errors=True) as scratch:
        async with Supervisor(Path(scratch)) as supervisor:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = {blow: group.create_task(_replicas(supervisor, blow, rounds)) for blow in BLOWS}
            except* HeadraceError as failures:
                raise failures.exceptions[0] from None
    return {blow: task.result() for blow, task in tasks.items()}


async def _replicas(supervisor: Supervisor, blow: str, rounds: int) -> Found:
    found, ports = Found(), [free_port(), free_port()]

    def spec(number: int, _: int) -> ChildSpec:
        argv = (sys.executable, "-m", "bench.plain", str(ports[number]), str(DRAIN_S))
        return ChildSpec(f"plain-{blow}-{number}", argv, {}, ports[number], restart=False)

    async with Pair(supervisor, spec) as pair, AsyncExitStack() as opened:
        urls = [f"http://127.0.0.1:{port}/v1/chat/completions" for port in ports]
        clients = [await opened.enter_async_context(Client(url)) for url in urls]

        async def ask(number: int, heard: Heard) -> Sample:
            first, second = clients[number % 2], clients[1 - number % 2]
            sample = await first.call(_body(number), heard.take)
            if sample.error is None:
                return sample
            heard.again()
            return await second.call(_body(number), heard.take)

        for number in range(rounds):
            _say(PEER, blow, number, rounds)
            for _, heard in (await _round(ask, pair, blow, number, rounds)).calls:
                (found.hit_ms if heard.tries > 1 else found.beside_ms).append(heard.pause_ms)
    return found


def _say(who: str, blow: str, number: int, rounds: int) -> None:
    text = f"headrace: {who}: {blow} {number + 1} of {rounds}, {moment_s(number, rounds):.1f} s into the answers"
    console(stderr=True).print(text)


# --- what is said --------------------------------------------------------------------------------------------------------


def _rows(ours: dict[str, Found], theirs: dict[str, Found]) -> list[Row]:
    return [
        row(
            f"{blow}_pause_{name}_ms",
            "ms",
            "all",
            percentile(ours[blow].hit_ms, quantile),
            PEER,
            percentile(theirs[blow].hit_ms, quantile),
        )
        for blow in BLOWS
        for name, quantile in (("p50", 0.5), ("p99", 0.99))
    ]


def _show_shares(ours: dict[str, Found]) -> None:
    """Where the time goes: the mean of each part."""
    shown = table("part, mean ms", *(f">{blow}" for blow in BLOWS), title="Where a pause goes, by the log's own stamps")
    parts: dict[str, Callable[[Shares], float]] = {
        "noticed: last token → taken over": lambda part: part.noticed,
        "fenced and read: taken over → started": lambda part: part.fenced,
        "began: started → next token": lambda part: part.began,
        "all of it": lambda part: part.total,
    }
    for name, of in parts.items():
        shown.add_row(name, *(_mean([of(part) for part in ours[blow].shares]) for blow in BLOWS))
    shown.add_row("as the caller sees it", *(_mean(ours[blow].hit_ms) for blow in BLOWS))
    shown.add_row("callers of the worker that went on", *(_mean(ours[blow].beside_ms) for blow in BLOWS))
    shown.add_row("the worst of those", *(f"{max(ours[blow].beside_ms, default=0):.0f}" for blow in BLOWS))
    shown.add_row(
        "callers hit, and whose longest pause was the takeover",
        *(f"{len(ours[blow].hit_ms)}, {len(ours[blow].shares)}" for blow in BLOWS),
    )
    console().print(shown)


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.0f}" if values else "-"


def _judge(ours: dict[str, Found], session_ms: int) -> None:
    """Says on standard error which aim was met, at worst."""
    for blow, aim_ms in ((CRASH, session_ms + AIM_OVER_SESSION_MS), (DRAIN, AIM_DRAIN_MS)):
        worst_ms = max(ours[blow].hit_ms)
        verdict = "met" if worst_ms <= aim_ms else "missed"
        console(stderr=True).print(f"aim: {blow} pause of {aim_ms} ms at worst: {verdict} ({worst_ms:.0f} ms)")
