"""Tiers on the running system: a live call is served before any number of batch lines, and they wait in the log and not before a worker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import pytest
from aiokafka import TopicPartition

from cli.records import Read
from cli.registry import now_ms
from infra.broker import EmbeddedKafka
from infra.kafka import make_admin, make_consumer, partitions_of
from infra.log import EventProducer
from infra.models_file import ModelEntry
from schemas.events import GenerationStarted, InferenceAdmitted, InferenceRequested
from schemas.ids import request_id
from schemas.topics import BATCH, GRANT_HEADER, INTERACTIVE, requests_topic, work_topic
from tests.system.asking import COMPLETIONS, body_of, call, heard
from tests.system.audit import Mark
from tests.system.fixtures_models import register, tell_of_start, worker
from tests.system.running import MODEL, RunningStack, script

JOBS, LINES, CALLS = 200, 100_000, 10
JOB_MS = 30
WINDOWS = 4 * 64
"""Records that the worker's windows hold together."""
WAIT_S = 120.0
SEEN_S = 1.0
"""Within that a worker surely has what the log holds for it."""
LONG = script(tokens=["x"], repeat=1_000, token_ms=200)
"""Minutes."""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack whose worker has a single slot: none is kept free, so only the order of what waits helps a live call."""
    with EmbeddedKafka(tmp_path_factory.mktemp("tiers-kafka")) as broker:
        stack = RunningStack(broker.settings, tmp_path_factory.mktemp("tiers-data"))
        try:
            stack.start(slots=1)
            yield stack
        finally:
            stack.close()


def line() -> dict[str, Any]:
    message = script(tokens=["x"], first_token_ms=JOB_MS)
    return {"type": "InferenceRequested", "model": MODEL, "messages": [{"role": "user", "content": message}]}


def write_lines(stack: RunningStack, tenant: str, count: int) -> None:
    """So many batch lines, straight to the log."""
    headers = ((GRANT_HEADER, grant_for(stack, BATCH, tenant).encode()),)
    rest = json.dumps(line()).encode().removeprefix(b"{")

    async def write() -> None:
        producer = EventProducer(stack.kafka, "batch")
        await producer.start()
        try:
            for _ in range(count):
                name = request_id(now_ms(), os.urandom(10))
                value = b'{"request_id": "' + name.encode() + b'", ' + rest
                await producer.send_raw(requests_topic("batch"), value, tenant.encode(), headers=headers)
        finally:
            await producer.stop()

    stack.thread.run(write(), WAIT_S)


def ask(stack: RunningStack, tenant: str) -> str:
    """A live call, answered: its request id."""
    answer = stack.client(tenant).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": script(tokens=["y"])}]
    )
    assert answer.choices[0].message.content == "y"
    return str(answer.id).removeprefix("chatcmpl-")


def begun_before(stack: RunningStack, live: str, starts: list[Read]) -> int:
    """How many batch jobs were begun after a live call was let in and before it was begun itself."""
    (scheduled,) = stack.events(live, "InferenceScheduled")
    (started,) = [start for start in starts if start.event.request_id == live]  # type: ignore[union-attr]
    between = range(scheduled.timestamp_ms, started.timestamp_ms)
    return sum(
        start.timestamp_ms in between
        for start in starts
        if start.event.tier == "batch"  # type: ignore[union-attr]
    )


def starts_of(mark: Mark) -> list[Read]:
    """In the order in which they began; of one millisecond a live call first."""
    starts = [item for item in mark.records() if item.name == "GenerationStarted"]
    return sorted(starts, key=lambda start: (start.timestamp_ms, start.event.tier))  # type: ignore[union-attr]


def timed(stack: RunningStack) -> tuple[list[str], float]:
    """So many live calls, one after another: their request ids, and how long one took, in seconds, by the median."""
    lives, took_s = [], []
    for _ in range(CALLS):
        began_s = time.monotonic()
        lives.append(ask(stack, "other"))
        took_s.append(time.monotonic() - began_s)
    return lives, median(took_s)


async def ends(stack: RunningStack, topic: str) -> int:
    consumer = make_consumer(stack.kafka)
    await consumer.start()
    try:
        places = [TopicPartition(topic, number) for number in await partitions_of(consumer, topic)]
        return sum((await consumer.end_offsets(places)).values())
    finally:
        await consumer.stop()


async def committed(stack: RunningStack, group: str) -> int:
    admin = make_admin(stack.kafka)
    await admin.start()
    try:
        offsets = await admin.list_consumer_group_offsets(group)
        return sum(max(0, found.offset) for found in offsets.values())
    finally:
        await admin.close()


@pytest.mark.timeout(300)
def test_live_calls_are_next_however_many_lines_wait(crowded: RunningStack) -> None:
    the_call_is_next_before_two_hundred_jobs(crowded)
    a_hundred_thousand_lines_wait_in_the_log(crowded)


def the_call_is_next_before_two_hundred_jobs(crowded: RunningStack) -> None:
    """triton#6055. A job has the slot until long after the call came, and is told to stop: whatever begins then is what was chosen."""
    mark, work = Mark(crowded, "tokens", "tokens.acme"), Mark(crowded, work_topic(MODEL, "1", INTERACTIVE))
    (running,) = ask_directly(crowded, BATCH, MODEL, LONG)
    crowded.until(lambda: crowded.events(running, "GenerationStarted"))
    write_lines(crowded, "acme", JOBS)
    crowded.until(lambda: crowded.reports(MODEL)[-1].waiting > 20)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, crowded, "other")
        crowded.until(work.records)
        time.sleep(SEEN_S)
        assert crowded.http().delete(f"/v1/streams/{running}").is_success
        live = asked.result()
    starts = starts_of(mark)
    assert [start.event.request_id for start in starts[:2]] == [running, live]  # type: ignore[union-attr]
    assert len(starts) < JOBS  # they wait still
    crowded.until(lambda: len([item for item in mark.records() if item.name == "InferenceCompleted"]) > JOBS, WAIT_S)


def a_hundred_thousand_lines_wait_in_the_log(crowded: RunningStack) -> None:
    work = work_topic(MODEL, "1", "batch")
    _, alone_s = timed(crowded)
    before = crowded.thread.run(ends(crowded, work))
    mark, told = Mark(crowded, "tokens", "tokens.acme"), Mark(crowded, "lifecycle")
    write_lines(crowded, "acme", LINES)
    lives, beside_s = timed(crowded)
    starts = starts_of(mark)
    assert all(begun_before(crowded, live, starts) <= 1 for live in lives)
    done = sum(item.name == "InferenceCompleted" for item in mark.records())
    assert crowded.thread.run(ends(crowded, work)) - before <= done + WINDOWS
    left = crowded.thread.run(ends(crowded, requests_topic("batch"))) - crowded.thread.run(
        committed(crowded, "admission.batch")
    )
    assert left > LINES * 0.9
    assert beside_s < 3 * alone_s + 0.2, f"a live call took {alone_s:.3f} s alone and {beside_s:.3f} s before the lines"
    # None of them is forgotten: batch goes on while there is room.
    crowded.until(lambda: sum(item.name == "InferenceCompleted" for item in mark.records()) > done + CALLS)
    # Who is killed with hundreds on its hands takes them up again, and lets none in twice.
    was = crowded.pid("admission-batch")
    crowded.kill("admission-batch")
    crowded.until_restarted("admission-batch", was)
    now = sum(item.name == "InferenceCompleted" for item in mark.records())
    crowded.until(lambda: sum(item.name == "InferenceCompleted" for item in mark.records()) > now + WINDOWS, WAIT_S)
    sources = [
        item.event.source.offset
        for item in told.records()
        if isinstance(item.event, InferenceAdmitted) and item.event.tier == "batch"
    ]
    assert len(sources) == len(set(sources))


# --- pools of their own -------------------------------------------------------------------------------------------------


PARTED = "parted"


@pytest.fixture
def parted(stack: RunningStack) -> Iterator[RunningStack]:
    """A model with a worker for each tier, `parted-interactive` and `parted-batch`."""
    register(stack, ModelEntry(PARTED, "1", "scripted", "scripted", 4096, slots=1, partitions=1))
    names = {tier: f"{PARTED}-{tier}" for tier in (INTERACTIVE, BATCH)}
    for tier, name in names.items():
        stack.add(name, "worker", PARTED, "1", HEADRACE_WORKER_TIERS=tier, HEADRACE_WORKER_WORKER_ID=name)
    for name in names.values():
        stack.await_ready(name)
    yield stack
    for name in names.values():
        stack.remove(name)


def made_by(stack: RunningStack, request_id: str) -> str:
    """The worker that began a request."""
    (start,) = stack.until(lambda: stack.events(request_id, "GenerationStarted"))
    assert isinstance(start.event, GenerationStarted)
    return start.event.worker_id


def ask_batch(stack: RunningStack, prompt: str) -> str:
    """A batch request, straight to the log: its id."""
    return ask_directly(stack, BATCH, PARTED, prompt)[0]


def grant_for(stack: RunningStack, tier: str, tenant: str) -> str:
    """A tenant's grant for a tier."""
    return str(json.loads(stack.command("tenants", "grant", tenant, "--tiers", tier, "--json").stdout)["grant"])


def ask_directly(
    stack: RunningStack, tier: str, model: str, prompt: str, count: int = 1, tenant: str = "acme"
) -> list[str]:
    """So many requests of a tenant's, straight to the log: their ids."""
    grant = grant_for(stack, tier, tenant)
    requests = [InferenceRequested(request_id(now_ms(), os.urandom(10)), model, prompt=prompt) for _ in range(count)]

    async def write() -> None:
        producer = EventProducer(stack.kafka, tier)
        await producer.start()
        try:
            headers = ((GRANT_HEADER, grant.encode()),)
            for request in requests:
                await producer.send_and_wait(requests_topic(tier), request, key=tenant, headers=headers)
        finally:
            await producer.stop()

    stack.thread.run(write())
    return [request.request_id for request in requests]


def ask_live(stack: RunningStack, prompt: str, **options: Any) -> tuple[int, str]:
    """A live call's status, and its id."""
    answer = stack.http().post("/v1/completions", json=body_of(COMPLETIONS, prompt, PARTED, **options))
    return answer.status_code, answer.headers["x-request-id"]


def test_tiers_may_have_pools_of_their_own(parted: RunningStack) -> None:
    """Each serves its tier alone, and what one has to spare is no promise to the other's callers."""
    slow = ask_batch(parted, script(tokens=["x"], repeat=100, token_ms=100))
    assert made_by(parted, slow) == "parted-batch"
    status, live = ask_live(parted, "while the other pool is full")
    assert (status, made_by(parted, live)) == (200, "parted-interactive")
    assert parted.ended(slow).facts["outcome"] == "completed"

    parted.stop("parted-interactive")
    parted.until(
        lambda: [(found.worker_id, found.running) for found in parted.reports(PARTED)] == [("parted-batch", 0)]
    )
    tell_of_start(parted, PARTED, 60_000)
    ask_soon = partial(call, parted, COMPLETIONS, body_of(COMPLETIONS, "hello", PARTED, timeout=5))
    # as soon as admission has heard that the worker is gone
    parted.until(lambda: heard(ask_soon()) == (503, "no_worker"))
    assert parted.ended(ask_batch(parted, "still served")).facts["outcome"] == "completed"


# --- a promised share ---------------------------------------------------------------------------------------------------


PROMISED, FLOOD = "promised", 6
RESERVED = ("tenants", "set-quota", "other", "--tier", INTERACTIVE, "--model", PROMISED)


@pytest.fixture
def promised(stack: RunningStack) -> Iterator[RunningStack]:
    """A model with a worker of two slots, one of which was promised to `other` before it began."""
    register(stack, ModelEntry(PROMISED, "1", "scripted", "scripted", 4096, slots=2, partitions=1))
    stack.command(*RESERVED, "--reserved-percent", "50")
    with worker(stack, PROMISED, PROMISED):
        yield stack
    stack.command(*RESERVED, "--remove")


def begun_of(stack: RunningStack, requests: list[str]) -> list[str]:
    return [name for name in requests if stack.events(name, "GenerationStarted")]


def test_a_promised_share_is_there_while_anothers_work_fills_the_pool(promised: RunningStack) -> None:
    """What waits of a tenant's own beyond its share has no claim: only who is promised a slot has that one."""
    flood = ask_directly(promised, INTERACTIVE, PROMISED, LONG, FLOOD)
    promised.until(lambda: [(seen.running, seen.waiting) for seen in promised.reports(PROMISED)] == [(1, FLOOD - 1)])
    answers = [
        promised.http("other").post("/v1/completions", json=body_of(COMPLETIONS, "mine", PROMISED)) for _ in range(3)
    ]
    assert [(answer.status_code, answer.json()["choices"][0]["text"]) for answer in answers] == [(200, "mine")] * 3
    assert len(begun_of(promised, flood)) == 1
    for name in reversed(flood):
        assert promised.http().delete(f"/v1/streams/{name}").is_success
    assert {promised.ended(name).facts["outcome"] for name in flood} == {"failed"}
