"""Small models on the whole path when something is wrong, late or crowded: the model's own errors, deadlines, tiers and junk."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from bridge.calls import new_request_id
from cli.records import Read
from cli.registry import now_ms
from infra.log import EventProducer
from schemas.events import (
    InferenceCompleted,
    InferenceFailed,
    InferenceRequested,
    InferenceScheduled,
    Quota,
    Reply,
    Sampling,
    Tensor,
)
from schemas.ids import request_id
from schemas.topics import BATCH, GRANT_HEADER, INTERACTIVE, TOKENS, requests_topic, work_topic
from tests.system.audit import Mark
from tests.system.fixtures_small import LOOPING, LOOPING_SLOTS, PICKING, SmallModels
from tests.system.running import CALL_WAIT_S, TENANTS, RunningStack
from tests.system.small_door import async_door, message, tensor
from tests.system.test_deadlines import produce
from tests.system.test_junk import dead_letters, send_junk
from tests.system.test_quotas import GIVEN_BACK_S, tenant
from tests.system.ways import ByHttp, ByRecord, Way, caller

ENDLESS = 1 << 40
JOB_TURNS = 15_000
"""Of a batch job: some 40 ms."""
JOBS = 200
CALLS = 20
LATE = "deadline_exceeded"
LATE_S = 3.0
"""So long after its deadline a request is told of it, at most, on a busy machine; what keeps the instance takes ten times as long."""
FREED_S = 10.0
"""So long after its caller left or cancelled it a request may have what it ran on."""
RUNNING, BEING_TOLD = 1, 1
"""Of its jobs, at most, when a call comes to the worker: it has one instance, and batches of one."""


def picks(*indices: int) -> dict[str, Any]:
    return {"inputs": [tensor("x", "INT64", [1, len(indices)], list(indices))]}


def turns(count: int) -> dict[str, Any]:
    return {"inputs": [tensor("turns", "INT64", [1, 1], [count])]}


def turning(count: int) -> Tensor:
    return Tensor("turns", "INT64", (1, 1), struct.pack("<q", count))


def within(milliseconds: int) -> dict[str, str]:
    return {"X-Headrace-Timeout-Ms": str(milliseconds)}


def outcomes(records: list[Read]) -> dict[str, list[str]]:
    """The names of the events of each request, in their order."""
    found: dict[str, list[str]] = {}
    for item in records:
        if name := getattr(item.event, "request_id", None):
            found.setdefault(name, []).append(item.name)
    return found


# --- what is wrong -----------------------------------------------------------------------------------------------------


def test_the_models_own_words_reach_the_caller_at_fault_and_its_neighbours_their_answers(
    made: SmallModels, http: httpx.Client, infer: Callable[[Any], Any]
) -> None:
    with ThreadPoolExecutor(8) as callers:
        path = f"/v2/models/{PICKING}/infer"
        told = callers.map(lambda index: http.post(path, json=picks(index)), [0, 99, 2, 1] * 4)
        called = callers.map(lambda index: infer(message([1, 1], [index], raw=True)), [77, 2])
        found, (wrong, right) = list(told), list(called)
    assert [answer.status_code for answer in found] == [200, 500, 200, 200] * 4
    values = [answer.json()["outputs"][0]["data"] for answer in found if answer.is_success]
    assert values == [[10.0], [30.0], [20.0]] * 4
    for answer in found[1::4]:
        assert list(answer.json()) == ["error"]
        assert "the model failed: " in answer.json()["error"]
        assert "idx=99" in answer.json()["error"]
    assert wrong.code() is grpc.StatusCode.INTERNAL
    assert "idx=77" in wrong.details()
    assert ("headrace-reason", "engine_error") in [(each.key, each.value) for each in wrong.trailing_metadata()]
    assert np.frombuffer(right.raw_output_contents[0], "<f4").tolist() == [30.0]


def await_event(stack: RunningStack, name: str, what: str) -> None:
    stack.until(lambda: stack.events(name, what))


def test_a_models_error_takes_the_way_of_an_answer(stack: RunningStack, made: SmallModels, http: httpx.Client) -> None:
    """No retry, no second attempt and no clock: its events are an answer's, but for the last."""
    path = f"/v2/models/{PICKING}/infer"
    good, bad = http.post(path, json=picks(1)), http.post(path, json=picks(99))
    assert (good.status_code, bad.status_code) == (200, 500)
    ways = []
    for answer in (good, bad):
        name = answer.headers["x-request-id"]
        stack.ended(name)
        await_event(stack, name, "InferenceAnswered")
        ways.append(sorted((item.topic, item.name) for item in stack.history(name)))
    failed = [(topic, name.replace("InferenceCompleted", "InferenceFailed")) for topic, name in ways[0]]
    assert ways[1] == sorted(failed)
    (ending,) = stack.events(bad.headers["x-request-id"], "InferenceFailed", TOKENS)
    assert isinstance(ending.event, InferenceFailed)
    assert (ending.event.source, ending.event.reason, ending.event.if_not_started) == ("worker", "engine_error", False)
    assert ending.event.message == bad.json()["error"]


def test_a_models_error_comes_as_fast_as_an_answer(made: SmallModels, http: httpx.Client) -> None:
    """Of as many of both, in turn: half of the errors take no longer than a few times what half of the answers take."""
    took_s: dict[int, list[float]] = {200: [], 500: []}
    for number in range(2 * CALLS):
        begun_s = time.monotonic()
        answer = http.post(f"/v2/models/{PICKING}/infer", json=picks([1, 99][number % 2]))
        took_s[answer.status_code].append(time.monotonic() - begun_s)
        assert answer.status_code == [200, 500][number % 2]
    good_s, bad_s = (statistics.median(each) for each in took_s.values())
    assert bad_s <= 3 * good_s + 0.1


def test_junk_among_its_work_stops_no_worker(stack: RunningStack, made: SmallModels, http: httpx.Client) -> None:
    """What nobody can read is put aside; what no model takes fails with its reason; the next is served by the same process."""
    before, mark = stack.pid(f"{PICKING}-a"), Mark(stack, "dead-letters")
    topics = [work_topic(PICKING, "1", tier) for tier in (INTERACTIVE, BATCH)]
    sent = stack.thread.run(send_junk(stack.kafka, topics, []))
    good = Tensor("x", "INT64", (1, 1), struct.pack("<q", 1))
    wrong: dict[str, dict[str, Any]] = {
        "a prompt": {"inputs": None, "prompt_token_ids": (1, 2, 3)},
        "no inputs": {"inputs": ()},
        "another name": {"inputs": (Tensor("y", "INT64", (1, 1), good.data),)},
        "another datatype": {"inputs": (Tensor("x", "FP32", (1, 2), good.data),)},
        "an unknown datatype": {"inputs": (Tensor("x", "FP8", (1, 8), good.data),)},
        "another rank": {"inputs": (Tensor("x", "INT64", (1,), good.data),)},
        "more than it has": {"inputs": (Tensor("x", "INT64", (1, 5), good.data),)},
        "less than it has": {"inputs": (Tensor("x", "INT64", (1, 1), good.data * 2),)},
        "half an element": {"inputs": (Tensor("x", "INT64", (1, 1), good.data[:4]),)},
        "a negative shape": {"inputs": (Tensor("x", "INT64", (-1, -1), good.data),)},
        "a huge shape": {"inputs": (Tensor("x", "INT64", (1 << 40, 1 << 40), good.data),)},
        "a rank of thousands": {"inputs": (Tensor("x", "INT64", (1,) * 5_000, good.data),)},
        "cut texts": {"inputs": (Tensor("x", "BYTES", (1, 1), b"\xff\xff\xff\xff"),)},
        "an unknown output": {"inputs": (good,), "outputs": ("z",)},
    }  # fmt: skip
    names = stack.thread.run(schedule(stack, list(wrong.values())))
    for what, name in zip(wrong, names, strict=True):
        stack.ended(name)
        (ending,) = stack.events(name, "InferenceFailed", TOKENS)
        assert isinstance(ending.event, InferenceFailed)
        assert (what, ending.event.reason) == (what, "invalid_request")
        assert ending.event.message
    stack.until(lambda: dead_letters(mark).keys() >= set(sent))
    assert http.post(f"/v2/models/{PICKING}/infer", json=picks(2)).json()["outputs"][0]["data"] == [30.0]
    assert stack.pid(f"{PICKING}-a") == before


async def schedule(stack: RunningStack, changes: list[dict[str, Any]]) -> list[str]:
    """Writes work for `picking` as admission does, on all partitions in turn; the requests' ids."""
    producer, found = EventProducer(stack.kafka, "test"), []
    await producer.start()
    try:
        for number, changed in enumerate(changes):
            name = request_id(now_ms(), os.urandom(10))
            prompt = changed.pop("prompt_token_ids", ())
            work = InferenceScheduled(
                name, "acme", PICKING, "1", INTERACTIVE, prompt, Sampling(max_tokens=1), now_ms() + 60_000, now_ms(),
                Reply(TOKENS, 0), "salt", **changed,
            )  # fmt: skip
            await producer.send_and_wait(work_topic(PICKING, "1", INTERACTIVE), work, partition=number % 2, key=name)
            found.append(name)
    finally:
        await producer.stop()
    return found


# --- time --------------------------------------------------------------------------------------------------------------


def begun(stack: RunningStack, mark: Mark, count: int = 1) -> None:
    """Returns once so many requests have begun since the mark."""
    stack.until(lambda: sum(item.name == "GenerationStarted" for item in mark.records()) >= count)


def ask_by_record(stack: RunningStack, count: int, timeout_ms: int) -> str:
    """So many turns for a direct producer; the request's id."""
    given = json.loads(stack.command("tenants", "grant", "acme", "--tiers", INTERACTIVE, "--json").stdout)
    asked = InferenceRequested(new_request_id(), LOOPING, inputs=(turning(count),), timeout_ms=timeout_ms)
    stack.thread.run(produce(stack, asked, INTERACTIVE, given))
    return asked.request_id


def why_ended(stack: RunningStack, name: str) -> str:
    """The reason of a request that has failed, once it has ended."""
    return str(stack.ended(name).facts["reason"])


async def test_a_deadline_is_kept_while_the_only_instance_is_busy(stack: RunningStack, made: SmallModels) -> None:
    """triton#7512: refused at its deadline, and never runs, whether it waited in the log or in the worker; the busy one goes on, and the next is served."""
    path = f"/v2/models/{LOOPING}/infer"
    mark = Mark(stack, "tokens")

    async def ask(milliseconds: int) -> tuple[httpx.Response, float]:
        """The answer, and how long after the deadline it came, in seconds."""
        begun_s = time.monotonic()
        answer = await client.post(path, json=turns(1), headers=within(milliseconds))
        return answer, time.monotonic() - begun_s - milliseconds / 1000

    async with async_door(stack, made) as client:
        busy = asyncio.create_task(client.post(path, json=turns(ENDLESS), headers=within(50_000)))
        await asyncio.to_thread(begun, stack, mark)
        direct = await asyncio.to_thread(ask_by_record, stack, 1, 4_000)
        waiting = [asyncio.create_task(ask(4_000)) for _ in range(LOOPING_SLOTS)]
        await asyncio.to_thread(begun, stack, mark, LOOPING_SLOTS)
        late, late_s = await ask(1_000)
        told = await asyncio.gather(*waiting)
        assert await asyncio.to_thread(why_ended, stack, direct) == LATE, "with no front door to say so"
        assert not busy.done()
        busy.cancel()
        await asyncio.wait({busy})
        after = await client.post(path, json=turns(3), headers=within(50_000))
    assert after.json()["outputs"][0]["data"] == [3.0]
    assert late.status_code in {503, 504}, "at its deadline, or before if it is known by then that its turn won't come"
    assert [answer.status_code for answer, _ in told] == [504] * LOOPING_SLOTS
    assert max(late_s, *(after_s for _, after_s in told)) < LATE_S, "and not when the busy one ends"
    assert min(after_s for _, after_s in told) > -0.1
    events = outcomes(mark.records())
    assert "GenerationStarted" not in events.get(late.headers["x-request-id"], [])
    assert not any("InferenceCompleted" in events[answer.headers["x-request-id"]] for answer, _ in told)


async def test_one_that_does_not_end_is_ended_at_its_deadline_and_the_next_is_served(
    made: SmallModels, stack: RunningStack
) -> None:
    """A front door would cancel it a little later: here there is none."""
    endless = await asyncio.to_thread(ask_by_record, stack, ENDLESS, 2_000)
    async with async_door(stack, made) as client:
        after = await client.post(f"/v2/models/{LOOPING}/infer", json=turns(3), headers=within(50_000))
    assert await asyncio.to_thread(why_ended, stack, endless) == LATE
    assert after.json()["outputs"][0]["data"] == [3.0]


async def test_who_leaves_frees_the_instance(stack: RunningStack, made: SmallModels) -> None:
    path = f"/v2/models/{LOOPING}/infer"
    mark = Mark(stack, "tokens")
    async with async_door(stack, made) as client:
        gone = asyncio.create_task(client.post(path, json=turns(ENDLESS), headers=within(600_000)))
        await asyncio.to_thread(begun, stack, mark)
        gone.cancel()
        left_s = time.monotonic()
        await asyncio.wait({gone})
        answer = await client.post(path, json=turns(2), headers=within(50_000))
    assert time.monotonic() - left_s < FREED_S
    assert answer.json()["outputs"][0]["data"] == [2.0]


@pytest.mark.parametrize("kind", [ByHttp, ByRecord], ids=lambda kind: kind.__name__)
def test_what_is_cancelled_frees_the_instance_and_its_tenants_only_place(
    stack: RunningStack, made: SmallModels, kind: type[Way]
) -> None:
    """And nonsense right after it holds neither."""
    name, path = f"onnx-{kind.__name__.lower()}", f"/v2/models/{LOOPING}/infer"
    stack.keys[name] = tenant(stack, name, Quota(INTERACTIVE, concurrent_requests=1))
    mark, headers = Mark(stack, "tokens"), {"Authorization": f"Bearer {stack.keys[name]}"} | within(100_000)
    with (
        httpx.Client(base_url=made.url, headers=headers, timeout=CALL_WAIT_S, trust_env=False) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        calling = threads.submit(client.post, path, json=turns(ENDLESS))
        begun(stack, mark)
        (running,) = {name for name, told in outcomes(mark.records()).items() if "GenerationStarted" in told}
        assert client.post(path, json=turns(1)).status_code == httpx.codes.TOO_MANY_REQUESTS
        with caller(stack, kind, name) as way:
            way.cancel("", running)
            cancelled_s = time.monotonic()
        assert calling.result(GIVEN_BACK_S * 2).status_code >= 400
        stack.until(lambda: client.post(path, json=turns(2)).status_code == httpx.codes.OK, GIVEN_BACK_S)
        assert time.monotonic() - cancelled_s < FREED_S
        for wrong in (b"{", b"{}", json.dumps(picks(1)).encode(), json.dumps(turns(1) | {"outputs": 3}).encode()):
            assert client.post(path, content=wrong).status_code == httpx.codes.BAD_REQUEST
            stack.until(lambda: client.post(path, json=turns(3)).status_code == httpx.codes.OK, GIVEN_BACK_S)


def test_a_live_call_is_next_before_two_hundred_jobs(
    stack: RunningStack, made: SmallModels, http: httpx.Client
) -> None:
    """triton#6055, whosesoever they are: and its tier, deadline and tenant are the same at every hop, as are a job's."""
    mark = Mark(stack, "tokens", "requests.", f"work.{LOOPING}.", "lifecycle")
    jobs = stack.thread.run(write_jobs(stack))
    stack.until(lambda: sum(item.name == "InferenceScheduled" for item in mark.records()) > JOBS // 10)
    worker = f"{LOOPING}-a"
    with ThreadPoolExecutor(1) as threads:
        stack.pause(worker)  # what ends before the call tells of its place only once the worker can see it
        try:
            calling = threads.submit(http.post, f"/v2/models/{LOOPING}/infer", json=turns(1), headers=within(45_000))
            live = stack.until(lambda: scheduled(mark, INTERACTIVE))
            resumed_ms = now_ms()
        finally:
            stack.resume(worker)
        answer = calling.result()
    assert (answer.headers["x-request-id"], answer.json()["outputs"][0]["data"]) == (live, [1.0])
    ends, begun_ms = told_ms(mark, "InferenceCompleted"), told_ms(mark, "GenerationStarted")[live]
    assert len(ends) < JOBS, "they wait still"
    before = [at for name, at in ends.items() if name in jobs and resumed_ms < at < ends[live]]
    assert sum(at > begun_ms for at in before) <= RUNNING + BEING_TOLD, "once the worker has it, it is next"
    assert len(before) <= LOOPING_SLOTS // 2, "nor did the worker take long to come to it"
    stack.ended(live)
    check_hops(mark.records(), live, "acme", INTERACTIVE, 45_000)
    stack.until(lambda: told_ms(mark, "InferenceCompleted").keys() >= {live, *jobs})
    for owner, job in zip(TENANTS, jobs[-len(TENANTS) :], strict=True):
        stack.ended(job)
        check_hops(mark.records(), job, owner, BATCH, 120_000)


def told_ms(mark: Mark, what: str) -> dict[str, int]:
    """When the worker told this, by request."""
    return {
        str(getattr(item.event, "request_id", "")): item.timestamp_ms
        for item in mark.records()
        if item.name == what and item.topic.startswith("tokens")
    }


def scheduled(mark: Mark, tier: str) -> str:
    """The id of what was scheduled in this tier, if anything was."""
    found = (item.event for item in mark.records())
    return next(
        (event.request_id for event in found if isinstance(event, InferenceScheduled) and event.tier == tier), ""
    )


def check_hops(records: list[Read], name: str, owner: str, tier: str, timeout_ms: int) -> None:
    events = {item.name: item for item in records if getattr(item.event, "request_id", "") == name}
    asked, work = events["InferenceRequested"], events["InferenceScheduled"].event
    assert asked.topic == requests_topic(tier)
    assert isinstance(work, InferenceScheduled)
    assert work.deadline_ms == asked.timestamp_ms + timeout_ms
    for what in (
        "InferenceScheduled",
        "InferenceAdmitted",
        "GenerationStarted",
        "InferenceStarted",
        "InferenceCompleted",
    ):
        event: Any = events[what].event
        assert (what, event.tenant, event.tier) == (what, owner, tier)
    assert isinstance(events["InferenceCompleted"].event, InferenceCompleted)


async def write_jobs(stack: RunningStack) -> list[str]:
    """Batch jobs of the live call's tenant and of another in turn, straight to the log; their ids."""
    commands = [("tenants", "grant", name, "--tiers", BATCH, "--json") for name in TENANTS]
    told = await asyncio.gather(*(asyncio.to_thread(stack.command, *command) for command in commands))
    headers = [((GRANT_HEADER, json.loads(each.stdout)["grant"].encode()),) for each in told]
    producer = EventProducer(stack.kafka, "batch")
    work = turning(JOB_TURNS)
    names = [request_id(now_ms(), os.urandom(10)) for _ in range(JOBS)]
    await producer.start()
    try:
        for number, name in enumerate(names):
            asked, turn = InferenceRequested(name, LOOPING, inputs=(work,), timeout_ms=120_000), number % len(TENANTS)
            await producer.send(requests_topic(BATCH), asked, key=TENANTS[turn], headers=headers[turn])
    finally:
        await producer.stop()
    return names
