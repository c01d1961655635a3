"""Deadlines and time limits hold whatever the workers do: here they are busy, frozen, absent, or never end. What was reserved comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bridge.calls import new_request_id
from infra.log import EventProducer
from infra.models_file import ModelEntry
from infra.settings import WorkerSettings
from schemas.events import InferenceFailed, InferenceRejected, InferenceRequested, Quota
from schemas.topics import GRANT_HEADER, LIFECYCLE, requests_topic
from tests.system.asking import COMPLETIONS, STREAMED, Answer, body_of, call, heard
from tests.system.audit import Audit, Story
from tests.system.fixtures_models import register, tell_of_start, worker
from tests.system.running import RunningStack, script
from tests.system.test_quotas import GIVEN_BACK_S, served_soon, tenant, told
from tests.system.ways import used

pytestmark = pytest.mark.timeout(180)
BRIEF, ABSENT, OCCUPIED, EMPTIED, SHALLOW = "brief", "absent", "occupied", "emptied", "shallow"
LIMIT_MS = 1_500
START_MS = 60_000
AT_ONCE_S = 3.0
"""Well before any deadline here that a refused call had."""
LATE = (504, "deadline_exceeded")
TOLD_MS_MAX = 5_000
"""After a deadline: far sooner than anything else that would end a call here, on however busy a machine."""


@pytest.fixture(scope="module")
def brief(stack: RunningStack) -> Iterator[str]:
    """A model whose answers may take a second and a half; it makes one at a time. Yields its name, which is its worker's too."""
    register(stack, ModelEntry(BRIEF, "1", "scripted", "scripted", 4096, slots=1, partitions=1, time_limit_ms=LIMIT_MS))
    with worker(stack, BRIEF, BRIEF) as name:
        yield name


@pytest.fixture(scope="module")
def absent(stack: RunningStack) -> str:
    """A model of which no worker has ever run."""
    register(stack, ModelEntry(ABSENT, "1", "scripted", "scripted", 4096, slots=1, partitions=1))
    return ABSENT


def limited(stack: RunningStack, name: str) -> str:
    """A new tenant that may ask one thing at a time, and has a budget; its name."""
    stack.keys[name] = tenant(stack, name, Quota("interactive", concurrent_requests=1, tokens_per_day=100_000))
    return name


def ask(stack: RunningStack, model: str, content: str, name: str, **options: Any) -> Answer:
    return call(stack, COMPLETIONS, body_of(COMPLETIONS, content, model, **options), name)


def assert_given_back(stack: RunningStack, name: str) -> None:
    """litellm#27955: whoever timed out may ask again, and nothing is held of what was reserved."""
    assert all(not found["reserved"] for found in usage_of(stack, name)["limits"])
    stack.until(lambda: served_soon(stack, stack.keys[name]), GIVEN_BACK_S)


def usage_of(stack: RunningStack, name: str) -> dict[str, Any]:
    (usage,) = told(stack, name)
    return usage


def ended_by_the_clock(stack: RunningStack, audit: Audit) -> Story:
    """The one request since: it never began, and the clock has ended it, not before its deadline."""
    ((request_id, story),) = audit.settled().items()
    assert story.admitted is not None
    assert story.endings[0] == ("failed", "deadline_exceeded", 0)
    assert never_ran(stack, story)
    (ending,) = stack.events(request_id, "InferenceFailed", LIFECYCLE)
    assert isinstance(ending.event, InferenceFailed)
    assert ending.event.source == "timer"
    assert 0 <= ending.timestamp_ms - story.admitted.deadline_ms < TOLD_MS_MAX
    return story


def never_ran(stack: RunningStack, story: Story) -> bool:
    assert story.admitted is not None
    return not stack.events(story.admitted.request_id, "GenerationStarted")


@STREAMED
def test_the_clock_answers_where_there_is_no_worker(stack: RunningStack, absent: str, stream: bool) -> None:
    name = limited(stack, f"unserved-{stream}".lower())
    audit = Audit(stack)
    assert heard(ask(stack, absent, "hello", name, stream=stream, timeout=1)) == LATE
    ended_by_the_clock(stack, audit)
    usage = usage_of(stack, name)
    assert (usage["tokens"], usage["running"], usage["reserved_tokens"]) == (0, 0, 0)
    assert_given_back(stack, name)


@pytest.mark.parametrize("tier", ["interactive", "batch"])
def test_a_direct_producer_hears_of_its_deadline_where_there_is_no_worker(
    stack: RunningStack, absent: str, tier: str
) -> None:
    given = json.loads(stack.command("tenants", "grant", "acme", "--tiers", tier, "--json").stdout)
    request = InferenceRequested(new_request_id(), absent, prompt="hello", timeout_ms=1_000)
    stack.thread.run(produce(stack, request, tier, given))
    ended = stack.ended(request.request_id)
    assert ended.facts["reason"] == "deadline_exceeded"
    assert not stack.events(request.request_id, "GenerationStarted")


async def produce(stack: RunningStack, request: InferenceRequested, tier: str, given: dict[str, Any]) -> None:
    producer = EventProducer(stack.kafka, "deadline-tests")
    await producer.start()
    try:
        headers = [(GRANT_HEADER, given["grant"].encode())]
        await producer.send_and_wait(requests_topic(tier), request, key=given["tenant"], headers=headers)
    finally:
        await producer.stop()


def test_a_pool_at_zero_takes_what_outlives_a_start_and_no_more(stack: RunningStack) -> None:
    """Who can't be served in time is told at once; who can is let in, answered when a worker comes, and told at the deadline if none does."""
    name = limited(stack, "early-bird")
    register(stack, ModelEntry(EMPTIED, "1", "scripted", "scripted", 4096, slots=1, partitions=1))
    with worker(stack, "emptied-a", EMPTIED):
        assert ask(stack, EMPTIED, "hello", name).texts == {0: "hello"}
    stack.until(lambda: not stack.reports(EMPTIED))

    tell_of_start(stack, EMPTIED, START_MS)
    # as soon as admission has heard that the worker is gone, and of the start
    stack.until(lambda: refused_for(stack, name, 5) is not None)
    told_s = stack.until(lambda: refused_for(stack, name, 30))
    assert START_MS - 30_000 <= told_s * 1_000 <= START_MS
    tell_of_start(stack, EMPTIED, 1_000)

    def let_in() -> Audit | None:
        audit = Audit(stack)
        return audit if heard(ask(stack, EMPTIED, "hello", name, timeout=2)) == LATE else None

    late = ended_by_the_clock(stack, stack.until(let_in))
    assert_given_back(stack, name)

    with ThreadPoolExecutor(1) as pool:
        audit = Audit(stack)
        waiting = pool.submit(ask, stack, EMPTIED, "at last", name)
        stack.until(lambda: waiting.done() or any(story.admitted for story in audit.stories().values()))
        with worker(stack, "emptied-b", EMPTIED):
            assert waiting.result().texts == {0: "at last"}
    assert never_ran(stack, late), "nor when a worker comes"
    assert_given_back(stack, name)


def refused_for(stack: RunningStack, name: str, timeout_s: int) -> int | None:
    """When a call is told to come again, in seconds, if it is refused: at once, for want of a worker, and the log says so."""
    post = stack.http(name).post
    answer = post("/v1/completions", json=body_of(COMPLETIONS, "hello", EMPTIED, timeout=timeout_s))
    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        return None
    assert answer.json()["error"]["code"] == "no_worker"
    assert answer.elapsed.total_seconds() < AT_ONCE_S
    request_id, told_s = answer.headers["x-request-id"], int(answer.headers["retry-after"])
    (refusal,) = stack.until(lambda: stack.events(request_id, "InferenceRejected", LIFECYCLE))
    told = refusal.event
    assert isinstance(told, InferenceRejected)
    assert (told.reason, told.tenant, told.model, told.tier) == ("no_worker", name, EMPTIED, "interactive")
    assert told.retry_after_ms is not None
    assert 0 <= told_s * 1_000 - told.retry_after_ms < 1_000
    return told_s


def test_a_queue_is_no_deeper_than_it_may_be_where_nobody_serves_it(stack: RunningStack) -> None:
    name, audit = limited(stack, "one-too-many"), Audit(stack)
    register(stack, ModelEntry(SHALLOW, "1", "scripted", "scripted", 4096, slots=1, max_queue_depth={"interactive": 1}))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, stack, SHALLOW, "hello", "acme", timeout=8)
        stack.until(lambda: waiting.done() or any(story.admitted for story in audit.stories().values()))
        refused = stack.http(name).post("/v1/completions", json=body_of(COMPLETIONS, "hello", SHALLOW, timeout=60))
        assert (refused.status_code, refused.json()["error"]["code"]) == (httpx.codes.SERVICE_UNAVAILABLE, "overloaded")
        assert refused.elapsed.total_seconds() < AT_ONCE_S
        assert heard(waiting.result()) == LATE
    assert usage_of(stack, name)["requests"] == 0


@STREAMED
def test_a_call_behind_a_busy_worker_hears_at_its_deadline_and_never_runs(stack: RunningStack, stream: bool) -> None:
    """triton#7512. What runs is the same tenant's: another's first call would have a slot of its own."""
    model = f"{OCCUPIED}-{stream}".lower()
    register(stack, ModelEntry(model, "1", "scripted", "scripted", 4096, slots=1, partitions=1))
    long = body_of(
        COMPLETIONS, script(tokens=["busy "], repeat=300, token_ms=100), model, stream=True, max_tokens=2_000
    )
    with worker(stack, model, model), stack.http().stream("POST", "/v1/completions", json=long) as running:
        lines = running.iter_lines()  # one that is dropped closes the connection
        next(line for line in lines if "busy" in line)
        audit = Audit(stack)
        assert heard(ask(stack, model, "hello", "acme", stream=stream, timeout=1)) == LATE
        late = ended_by_the_clock(stack, audit)
        running.close()
        assert ask(stack, model, "hello", "acme").texts == {0: "hello"}
        assert never_ran(stack, late)


@STREAMED
def test_the_clock_answers_for_a_worker_that_does_not(stack: RunningStack, brief: str, stream: bool) -> None:
    name = limited(stack, f"frozen-out-{stream}".lower())
    audit = Audit(stack)
    # One that tells of what it runs, and freezes, is believed to be busy: then the call is refused at once.
    # So is one whose last report is older than the last thing that it did.
    time.sleep(2 * WorkerSettings().report_interval_ms / 1000)
    stack.until(lambda: [report.running for report in stack.reports(brief)][-1:] == [0])
    stack.pause(brief)
    try:
        assert heard(ask(stack, brief, "hello", name, stream=stream, timeout=1)) == LATE
        late = ended_by_the_clock(stack, audit)
        assert_given_back(stack, name)
    finally:
        stack.resume(brief)
    assert call(stack, COMPLETIONS, body_of(COMPLETIONS, "hello", brief)).texts == {0: "hello"}
    assert never_ran(stack, late), "nor once the worker goes on"


def test_an_answer_without_end_is_ended_and_its_slot_is_free_again(stack: RunningStack, brief: str) -> None:
    name, audit = limited(stack, "endless"), Audit(stack)
    endless = script(tokens=["on and "], repeat=1_000, token_ms=100)
    answer = ask(stack, brief, endless, name, stream=True, max_tokens=3_000)
    assert answer.status == 200
    assert answer.texts[0].startswith("on and on and ")
    assert answer.error is not None
    assert answer.error["code"] == "time_limit_exceeded"
    assert not answer.finished
    ((request_id, story),) = audit.settled(scripted=False).items()
    assert story.endings[0][:2] == ("failed", "time_limit_exceeded")
    assert story.admitted is not None
    # What was delivered is charged: a token of this engine is a byte.
    delivered = len(answer.texts[0].encode())
    assert delivered == sum(story.stream.accepted)
    assert usage_of(stack, name)["tokens"] == story.admitted.prompt_tokens + delivered == used(audit)
    (ending,) = stack.events(request_id, "InferenceFailed", LIFECYCLE)
    assert isinstance(ending.event, InferenceFailed)
    assert ending.event.source == "timer"
    assert_given_back(stack, name)
    assert call(stack, COMPLETIONS, body_of(COMPLETIONS, "hello", brief)).texts == {0: "hello"}
