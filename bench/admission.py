"""How many requests one admission process lets in, and how long each takes there, with everything on.

Requests of many tenants with quotas are written straight to `requests.interactive`, as direct producers do. No worker takes what is let in, but
reports of a few are written every second (`bench.reports`), which place each request and tell how long it would wait.
`requests_per_s_per_core` is what was let in over the process's own CPU time, so that whoever else needs the machine's cores doesn't
count; latency is between the broker's stamps of the request and of its work. The peer is a process that copies records and decides
nothing (`bench.relay`): what Kafka's client costs by itself. A second process then takes half of the partitions: what a request costs of
the cores' time with two is compared with what it costs with one. So is one process with other counts of partitions, each on a log of its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import psutil
from aiokafka import AIOKafkaConsumer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from bench.load import percentile
from bench.reports import reported
from bench.rows import Row, conditions, quantile_rows, row, show
from bench.stack import private_stack
from cli.context import console
from cli.registry import add_key, new_key, new_tenant, now_ms, write_tenant
from cli.stack import Stack
from infra.grants import Grant, mint
from infra.kafka import make_consumer, partitions_of
from infra.log import EventDecoder, EventProducer
from infra.models_file import CacheEntry, ModelEntry
from infra.read import Positions, read_to_end
from infra.settings import KafkaSettings
from infra.supervisor import ChildSpec
from infra.topics import ensure
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, InferenceScheduled, Message, Quota, Reply, Sampling
from schemas.ids import request_id
from schemas.reasons import Reason
from schemas.topics import (
    GRANT_HEADER,
    HOUR_MS,
    INTERACTIVE,
    TOKENS,
    PartitionCounts,
    TopicSpec,
    requests_topic,
    work_topic,
)

PEER = "a relay that decides nothing"
MODEL, VERSION, CONTEXT = "scripted", "1", 8192
WORK = work_topic(MODEL, VERSION, INTERACTIVE)
COPIES = "copies"
ADMISSION, SECOND = f"admission-{INTERACTIVE}", f"admission-{INTERACTIVE}-2"
TENANTS = 20
STEPS = "headrace_admission_seconds"
CACHE = CacheEntry(ttl_s=600)
SLOTS = 8_192
"""So many, of each worker that is reported, that no tenant waits for its turn and nothing is refused, though no worker begins anything."""
QUOTA = Quota(INTERACTIVE, "", "", 100_000_000, 1_000_000_000, 100_000_000, 10_000_000_000)
PROMPT = (
    "The headrace leads water from the weir to the turbine, and what isn't needed runs over the weir. Where does it go? "
    * 2
)
WARM_UP, AT_MAX, AT_HALF_S = 6_000, 12_000, 10
QUICK_SHARE = 10
PARTITIONS = (1, 16)
"""Of requests, beside the usual number."""
RATE_PER_S = 750
"""Half of the aim."""
AIM_PER_S, AIM_P99_MS = 1_500.0, 15.0
STALL_S = 60.0
TICK_S, LOOK_S, AWAKE_S = 0.002, 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """Of one process: requests a second of its CPU time, and of the clock, when it has as many as it can take; latency at half of the aim, ms."""

    per_core: float
    per_s: float
    waits_ms: list[float]


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. `quick` writes a tenth of the requests. Raises HeadraceError if a request isn't let in."""
    before, share = conditions(), QUICK_SHARE if quick else 1
    model = ModelEntry(MODEL, VERSION, "scripted", "scripted", CONTEXT, slots=SLOTS, workers=0, cache=CACHE)
    env = {"HEADRACE_GRANT_SECRET": secrets.token_hex(32)}
    async with _stack(model, env) as stack, _load(stack, env, share) as load:
        async with load.reports():
            ours = await load.measure((ADMISSION,), requests_topic(INTERACTIVE), WORK)
            steps = await _steps_us(f"http://127.0.0.1:{stack.ops_ports[ADMISSION]}/metrics")
            await stack.supervisor.start(stack.admission_spec(SECOND, INTERACTIVE))
            shared = await load.at_max((ADMISSION, SECOND), WORK)
        for name in (ADMISSION, SECOND):
            await stack.supervisor.stop(name)
        await ensure(stack.kafka, [TopicSpec(COPIES, 8, "tenant", HOUR_MS)])
        relay = ("-m", "bench.relay", stack.kafka.bootstrap, requests_topic(INTERACTIVE), COPIES)
        await stack.supervisor.start(ChildSpec("relay", (sys.executable, *relay)))
        theirs = await load.measure(("relay",), requests_topic(INTERACTIVE), COPIES)
    others = {}
    for count in PARTITIONS:
        async with _stack(model, env, count) as stack, _load(stack, env, share) as load, load.reports():
            others[count] = await load.at_max((ADMISSION,), WORK)
    rows = _rows(ours, theirs, shared) + _rows_of_partitions(ours, others)
    show(rows, as_json=as_json, title=f"One admission process, everything on ({before})")
    _tell_where_it_goes(ours, theirs, steps)
    p99_ms = percentile(ours.waits_ms, 0.99)
    met = ours.per_core >= AIM_PER_S and p99_ms < AIM_P99_MS
    console(stderr=True).print(
        f"aim: {AIM_PER_S:.0f} requests/s a core, p99 under {AIM_P99_MS:.0f} ms at {RATE_PER_S}/s: {'met' if met else 'missed'} "
        f"({ours.per_core:.0f}, {p99_ms:.1f} ms)"
    )
    return 0


def _rows(ours: Found, theirs: Found, shared: tuple[float, float]) -> list[Row]:
    rows = [
        row("requests_per_s_per_core", "requests/s", "max", ours.per_core, PEER, theirs.per_core),
        row("requests_per_s", "requests/s", "max", ours.per_s, PEER, theirs.per_s),
        row("requests_per_s_per_core", "requests/s", "max, 2 processes", shared[0], "one process", ours.per_core),
        row("requests_per_s", "requests/s", "max, 2 processes", shared[1], "one process", ours.per_s),
    ]
    rows += quantile_rows("latency", f"{RATE_PER_S}/s", ours.waits_ms, PEER, theirs.waits_ms)
    return rows


def _rows_of_partitions(ours: Found, others: dict[int, tuple[float, float]]) -> list[Row]:
    usual = f"{PartitionCounts().requests} partitions"
    return [
        row(metric, "requests/s", f"max, {_partitions(count)}", found[place], usual, (ours.per_core, ours.per_s)[place])
        for count, found in others.items()
        for place, metric in enumerate(("requests_per_s_per_core", "requests_per_s"))
    ]


def _partitions(count: int) -> str:
    return f"{count} partition{'s' if count > 1 else ''}"


def _stack(model: ModelEntry, env: dict[str, str], partitions: int | None = None) -> AbstractAsyncContextManager[Stack]:
    """On a log whose requests have so many partitions, or the usual number."""
    return private_stack((model,), env, {} if partitions is None else {"requests": partitions})


@asynccontextmanager
async def _load(stack: Stack, env: dict[str, str], share: int) -> AsyncIterator[Load]:
    """The load for its admission, when what isn't measured has stopped."""
    producer = EventProducer(stack.kafka, "bench")
    await producer.start()
    try:
        grants = await _grants(stack.kafka, env["HEADRACE_GRANT_SECRET"])
        for name in ("endings", "lifecycle", "bridge", "admission-batch"):
            await stack.supervisor.stop(name)
        yield Load(stack, producer, grants, share)
    finally:
        await producer.stop()


def _tell_where_it_goes(ours: Found, theirs: Found, steps_us: dict[str, float]) -> None:
    """Of the process's time a request at most, the steps that it measures itself, and what Kafka's client takes."""
    whole_us, client_us = 1e6 / ours.per_core, 1e6 / theirs.per_core
    rest_us = whole_us - client_us - sum(steps_us.values())
    parts = ", ".join(f"{name} {value:.0f}" for name, value in steps_us.items())
    console(stderr=True).print(
        f"where {whole_us:.0f} us a request go: {parts}, Kafka's client as in the relay {client_us:.0f}, the rest (decoding, the ledger, encoding) "
        f"{rest_us:.0f}; it has one thread, and keeps {ours.per_s / ours.per_core:.2f} of a core busy at most"
    )


async def _steps_us(url: str) -> dict[str, float]:
    """By step, the microseconds that a process spent in it for each request, on the average, by its metrics."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(url)).raise_for_status().text
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{STEPS}_sum":
                sums[sample.labels["check"]] = sample.value
            elif sample.name == f"{STEPS}_count":
                counts[sample.labels["check"]] = sample.value
    return {step: seconds / counts[step] * 1e6 for step, seconds in sums.items() if counts.get(step)}


async def _grants(kafka: KafkaSettings, secret: str) -> list[tuple[str, bytes]]:
    """Tenants with a quota, each with a grant."""
    found = []
    for number in range(TENANTS):
        _, key = new_key((INTERACTIVE,), now_ms())
        tenant = add_key(new_tenant(f"bench-{number}", now_ms()), key)
        await write_tenant(kafka, replace(tenant, quotas=(QUOTA,)))
        grant = Grant(tenant.tenant, key.key_id, (INTERACTIVE,), Reply(TOKENS, number % 8), now_ms() + HOUR_MS)
        found.append((tenant.tenant, mint(secret.encode(), grant).encode()))
    return found


class Load:
    """Writes requests, and finds what became of them in the log."""

    def __init__(self, stack: Stack, producer: EventProducer, grants: list[tuple[str, bytes]], share: int) -> None:
        """`share` divides all numbers."""
        self._stack = stack
        self._producer = producer
        self._grants = grants
        self._share = share

    def reports(self) -> AbstractAsyncContextManager[None]:
        """Within it there are reports of workers."""
        return reported(self._stack.kafka, self._producer, (MODEL, VERSION, INTERACTIVE), SLOTS)

    async def measure(self, processes: tuple[str, ...], source: str, target: str) -> Found:
        """What processes that turn each record of `source` to one of `target` carry."""
        per_core, per_s = await self.at_max(processes, target)
        begun: Positions = {}
        for topic in (source, target):
            async for _ in read_to_end(self._stack.kafka, topic, begun):
                pass
        count = RATE_PER_S * AT_HALF_S // self._share
        await self._send(count, target, RATE_PER_S)
        stamps = [await self._stamps(topic, begun) for topic in (source, target)]
        waits_ms = [float(stamps[1][name] - stamp) for name, stamp in stamps[0].items()]
        return Found(per_core, per_s, waits_ms)

    async def at_max(self, processes: tuple[str, ...], target: str) -> tuple[float, float]:
        """Requests a second of their CPU time, and of the clock, when they have as many as they can take."""
        await self._awake(target)
        await self._send(WARM_UP // self._share, target)
        used = self._cpu_s(processes)
        wall_s = await self._send(AT_MAX // self._share, target)
        used = self._cpu_s(processes) - used
        console(stderr=True).print(f"{' and '.join(processes)}: {(WARM_UP + AT_MAX) // self._share} requests done")
        return AT_MAX // self._share / used, AT_MAX // self._share / wall_s

    async def _awake(self, target: str) -> None:
        """Write a request now and then until one comes through, and then as long until all have."""
        consumer = make_consumer(self._stack.kafka)
        await consumer.start()
        try:
            while not await _end(consumer, target):
                await self._one(0)
                await asyncio.sleep(AWAKE_S)
            await asyncio.sleep(AWAKE_S)
        finally:
            await consumer.stop()

    async def _stamps(self, topic: str, begun: Positions) -> dict[str, int]:
        decoder = EventDecoder(self._stack.kafka)
        found: dict[str, int] = {}
        async for record in read_to_end(self._stack.kafka, topic, dict(begun)):
            event = await decoder.decode(record.value)
            assert isinstance(event, InferenceRequested | InferenceScheduled)
            found.setdefault(event.request_id, record.timestamp)
        return found

    def _cpu_s(self, processes: tuple[str, ...]) -> float:
        """What processes have used of the cores, together."""
        pids = [status.pid for status in self._stack.supervisor.status() if status.name in processes]
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(used.user + used.system for used in times)

    async def _send(self, count: int, target: str, rate_per_s: float | None = None) -> float:
        """Write requests at a rate, or all at once, and wait until `target` has one record more for each: the seconds it took."""
        consumer = make_consumer(self._stack.kafka)
        await consumer.start()
        try:
            before = await _end(consumer, target)
            began_s = time.monotonic()
            for number in range(count):
                if rate_per_s is not None and (early_s := began_s + number / rate_per_s - time.monotonic()) > TICK_S:
                    await asyncio.sleep(early_s)
                await self._one(number)
            until_s = time.monotonic() + STALL_S
            while (there := await _end(consumer, target) - before) < count:
                if time.monotonic() > until_s:
                    raise HeadraceError(Reason.UNAVAILABLE, f"only {there} of {count} requests came to {target}")
                await asyncio.sleep(LOOK_S)
            return time.monotonic() - began_s
        finally:
            await consumer.stop()

    async def _one(self, number: int) -> None:
        tenant, grant = self._grants[number % len(self._grants)]
        name = request_id(now_ms(), os.urandom(10))
        # No two are equal, so each is looked for in the cache and none is there.
        message = Message("user", f"{PROMPT}{name}")
        asked = InferenceRequested(name, MODEL, (message,), sampling=Sampling(max_tokens=64, temperature=0.0))
        await self._producer.send(requests_topic(INTERACTIVE), asked, key=tenant, headers=((GRANT_HEADER, grant),))


async def _end(consumer: AIOKafkaConsumer, topic: str) -> int:
    """How many records a topic has had."""
    places = [TopicPartition(topic, number) for number in await partitions_of(consumer, topic)]
    return sum((await consumer.end_offsets(places)).values())
