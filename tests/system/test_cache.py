"""The response cache on the running system: what a hit is, what it costs, what callers say of it; equal calls at once; Redis and kills."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from bridge.calls import new_request_id
from cli.registry import now_ms
from infra.grants import Grant, mint
from infra.log import EventProducer
from infra.models_file import CacheEntry, ModelEntry
from infra.settings import grant_secret
from schemas.events import (
    GenerationStarted,
    InferenceAdmitted,
    InferenceCompleted,
    InferenceRequested,
    Message,
    ModelPromoted,
    Quota,
    Reply,
    Sampling,
)
from schemas.topics import GRANT_HEADER, REGISTRY, TOKENS, requests_topic
from tests.redis_server import RedisServer
from tests.system.fixtures_models import register, worker
from tests.system.running import RunningStack, script
from tests.system.test_quotas import tenant

pytestmark = pytest.mark.timeout(180)
CACHED = "cached"
ADMISSION = "admission-interactive"
KILLED_CALLS = 40
UNSERVED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "not_invented_yet": 1,
}
"""What would change an answer and is in no key: a call that says so is refused, and has nothing from the cache."""


def entry(version: str = "1", **cache: Any) -> ModelEntry:
    settings = CacheEntry(**{"ttl_s": 600, **cache})
    return ModelEntry(CACHED, version, "scripted", "scripted", 4096, slots=8, partitions=4, cache=settings)


@pytest.fixture(scope="module")
def cached(stack: RunningStack) -> Iterator[str]:
    """A model that has a response cache, and two workers. Yields its name."""
    register(stack, entry())
    with worker(stack, "cached-a", CACHED), worker(stack, "cached-b", CACHED):
        stack.until(lambda: len({_place(stack) for _ in range(8)}) == 2)
        yield CACHED


def _place(stack: RunningStack) -> str:
    """The worker to which admission sends a call. It must know both before equal calls meet on one for sure."""
    (admitted,) = told(stack, ask(stack, "where", control="no-store").headers["x-request-id"], InferenceAdmitted)
    (detail,) = [each.detail for each in admitted.decisions if each.check == "place"]
    found = re.search(r"worker (\S+)", detail)
    assert found, detail
    return found[1]


def directed(name: str, **directions: Any) -> str:
    """A prompt of its own, whose answer is new each time it is generated."""
    return script(nonce=True, name=name, **directions)


def ask(stack: RunningStack, prompt: str, *, key: str = "", control: str = "", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key or stack.keys['acme']}"} | ({"cache-control": control} if control else {})
    messages = [{"role": "user", "content": prompt}]
    body = {"model": CACHED, "messages": messages, "temperature": 0, "max_tokens": 100, **options}
    url = f"{stack.base_url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in chunks)


def outcome(response: httpx.Response) -> str | None:
    found: str | None = response.headers.get("x-headrace-cache")
    return found


def until_hit(stack: RunningStack, prompt: str, **how: Any) -> httpx.Response:
    """Ask until the cache answers."""

    def look() -> httpx.Response | None:
        response = ask(stack, prompt, **how)
        assert response.status_code == 200, response.text
        return response if outcome(response) == "hit" else None

    found: httpx.Response = stack.until(look, 20)
    return found


def told(stack: RunningStack, request_id: str, kind: type) -> list[Any]:
    return [item.event for item in stack.history(request_id) if isinstance(item.event, kind)]


def metric(stack: RunningStack, process: str, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{stack.ops_ports[process]}/metrics", timeout=5, trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_a_hit_is_the_same_answer_streamed_or_not(stack: RunningStack, cached: str) -> None:
    first = ask(stack, prompt := directed("the same"))
    assert (outcome(first), "age" in first.headers) == ("miss", False)
    hit = until_hit(stack, prompt)
    streamed = until_hit(stack, prompt, stream=True)
    assert text_of(hit) == text_of(streamed)
    assert 0 <= int(hit.headers["age"]) < 60
    usage = hit.json()["usage"]
    assert usage["completion_tokens"] == len(text_of(hit)) + 1
    stack.ended(hit.headers["x-request-id"])
    (admitted,) = told(stack, hit.headers["x-request-id"], InferenceAdmitted)
    assert admitted.cached and ("cache", "hit") in [(each.check, each.outcome) for each in admitted.decisions]
    explained = stack.command("explain", hit.headers["x-request-id"]).stdout
    assert "cache" in explained and "hit" in explained


def test_a_direct_producer_has_it_too(stack: RunningStack, cached: str) -> None:
    text = text_of(until_hit(stack, prompt := directed("direct")))
    rid = new_request_id()
    grant = mint(
        grant_secret(stack.data_dir),
        Grant("acme", _key_id(stack), ("interactive",), Reply(TOKENS, 0), now_ms() + 60_000),
    )
    request = InferenceRequested(
        rid, cached, messages=(Message("user", prompt),), sampling=Sampling(temperature=0.0, max_tokens=100)
    )

    async def produce() -> None:
        producer = EventProducer(stack.kafka, "test")
        await producer.start()
        headers = [(GRANT_HEADER, grant.encode())]
        await producer.send_and_wait(requests_topic("interactive"), request, key="acme", headers=headers)
        await producer.stop()

    stack.thread.run(produce())
    stack.ended(rid)
    assert "".join(item.event.text for item in stack.events(rid, "TokensGenerated")) == text  # type: ignore[union-attr]
    (begun,) = told(stack, rid, GenerationStarted)
    assert begun.cache_age_ms is not None


def _key_id(stack: RunningStack) -> str:
    (admitted,) = told(stack, ask(stack, "who").headers["x-request-id"], InferenceAdmitted)
    return str(admitted.key_id)


def test_a_hit_costs_a_request_and_no_tokens(stack: RunningStack, cached: str) -> None:
    key = tenant(stack, "thrifty", Quota("interactive", tokens_per_day=1_500))
    prompt = directed("thrifty")
    until_hit(stack, prompt, key=key)

    def totals() -> tuple[int, int, int]:
        lines = stack.command("tenants", "usage", "thrifty", "--tier", "interactive", "--json").stdout.splitlines()
        (found,) = [row for row in map(json.loads, lines) if row["scope"] == ""]
        return found["requests"], found["tokens"], found["running"]

    stack.until(lambda: totals()[2] == 0)
    before = totals()
    for _ in range(5):
        assert outcome(ask(stack, prompt, key=key)) == "hit"
    stack.until(lambda: totals() == (before[0] + 5, before[1], 0), 20)
    statuses = (ask(stack, directed(f"thrifty {number}"), key=key).status_code for number in range(60))
    assert 429 in statuses
    assert outcome(ask(stack, prompt, key=key)) == "hit", "who has no tokens left may have what costs none"


def test_what_the_caller_says_is_heeded(stack: RunningStack, cached: str) -> None:
    old = text_of(until_hit(stack, prompt := directed("said")))
    new = ask(stack, prompt, control="no-cache")
    assert outcome(new) == "miss" and text_of(new) != old
    stack.until(lambda: text_of(ask(stack, prompt)) == text_of(new), 20)
    time.sleep(2.1)
    assert outcome(ask(stack, prompt, control="max-age=1")) == "miss"
    assert outcome(ask(stack, prompt, control="max-age=600")) == "hit"
    secret = directed("unkept")
    assert {outcome(ask(stack, secret, control="no-store")) for _ in range(3)} == {None}
    assert outcome(ask(stack, secret)) == "miss"
    refused = ask(stack, prompt, control="max-age=soon")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Cache-Control"


def test_pairs_that_differ_are_two_answers(stack: RunningStack, cached: str) -> None:
    text = text_of(until_hit(stack, prompt := directed("pair")))
    for options in (
        {"seed": 1},
        {"max_tokens": 99},
        {"top_k": 3},
        {"stop": ["~"]},
        {"top_p": 0.5},
        {"n": 2},
        {"logprobs": True},
    ):
        other = ask(stack, prompt, **options)
        assert outcome(other) == "miss" and text_of(other) != text, options
    assert outcome(ask(stack, prompt, key=stack.keys["other"])) == "miss"
    assert outcome(ask(stack, prompt, temperature=0.5)) is None
    assert outcome(ask(stack, prompt)) == "hit"
    for name, value in UNSERVED.items():
        refused = ask(stack, prompt, **{name: value})
        assert (refused.status_code, refused.json()["error"]["param"], outcome(refused)) == (400, name, None)


@pytest.mark.parametrize("stream", [True, False])
def test_equal_calls_at_once_are_generated_once(stack: RunningStack, cached: str, stream: bool) -> None:
    prompt = directed(f"at once {stream}", first_token_ms=3_000, token_ms=10)
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: ask(stack, prompt, stream=stream), range(20)))
    assert len({text_of(response) for response in found}) == 1
    assert sum(metric(stack, name, "headrace_shared_generations_total") for name in ("cached-a", "cached-b")) > 0


def test_a_caller_that_leaves_takes_nobody_else_along(stack: RunningStack, cached: str) -> None:
    prompt = directed("leaves", first_token_ms=300, token_ms=30)
    with ThreadPoolExecutor(3) as pool, ExitStack() as gone:
        client = gone.enter_context(httpx.Client(timeout=0.2, trust_env=False))
        others = [pool.submit(ask, stack, prompt) for _ in range(2)]
        with pytest.raises(httpx.TimeoutException):
            client.post(
                f"{stack.base_url}/v1/chat/completions",
                json={
                    "model": cached,
                    "messages": [{"role": "user", "content": prompt}],
                    "temperature": 0,
                    "max_tokens": 100,
                },
                headers={"authorization": f"Bearer {stack.keys['acme']}"},
            )
        assert len({text_of(other.result()) for other in others}) == 1


def test_kills_of_admission_cost_hits_and_no_answer(stack: RunningStack, cached: str) -> None:
    prompt = script(tokens=["steady "], repeat=20, name="killed")
    text = text_of(until_hit(stack, prompt, max_tokens=200))
    before = stack.pid(ADMISSION)
    with ThreadPoolExecutor(KILLED_CALLS) as pool:
        calls = [
            pool.submit(ask, stack, prompt, max_tokens=200, stream=number % 2 == 0) for number in range(KILLED_CALLS)
        ]
        time.sleep(0.05)
        stack.kill(ADMISSION)
        found = [call.result() for call in calls]
    assert {text_of(response) for response in found} == {text}
    stack.until_restarted(ADMISSION, before)
    for response in found:
        assert len(told(stack, response.headers["x-request-id"], InferenceCompleted)) >= 1
    assert text_of(until_hit(stack, prompt, max_tokens=200)) == text


@contextmanager
def admission_with(stack: RunningStack, **env: str) -> Iterator[None]:
    """Admission of the interactive tier with this environment while the block runs."""

    def anew(**given: str) -> None:
        stack.remove(ADMISSION)
        stack.add(ADMISSION, "streams", "admission", "--tier", "interactive", **given)
        stack.await_ready(ADMISSION)

    anew(**env)
    try:
        yield
    finally:
        anew()


def test_the_loss_of_redis_costs_hits_alone(
    stack: RunningStack, cached: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    try:
        with admission_with(stack, HEADRACE_ADMISSION_CACHE_URL=redis.url):
            text = text_of(until_hit(stack, prompt := directed("redis")))
            seen: list[str | None] = []
            for number in range(12):
                if number == 4:
                    redis.kill()
                seen.append(outcome(response := ask(stack, prompt)))
                assert response.status_code == 200
                assert number > 3 or text_of(response) == text
            assert seen[:4] == ["hit"] * 4 and seen[5:] == ["miss"] * 7
            redis.start()
            until_hit(stack, prompt)
    finally:
        redis.kill()


def test_promoting_another_version_misses(stack: RunningStack, cached: str) -> None:
    text = text_of(until_hit(stack, prompt := directed("promoted")))

    def promote(version: str) -> None:
        async def write() -> None:
            producer = EventProducer(stack.kafka, "test")
            await producer.start()
            await producer.send_and_wait(REGISTRY, ModelPromoted(cached, version), key=cached)
            await producer.stop()

        stack.thread.run(write())

    try:
        register(stack, entry("2"))
        stack.add("cached-2", "worker", cached, "2")
        stack.await_ready("cached-2")
        promote("2")
        stack.until(
            lambda: (found := ask(stack, prompt)).json()["system_fingerprint"] == "2" and outcome(found) == "miss"
        )
        assert text_of(until_hit(stack, prompt)) != text
    finally:
        promote("1")
        stack.until(lambda: ask(stack, prompt).json()["system_fingerprint"] == "1")
        stack.remove("cached-2")
    assert text_of(until_hit(stack, prompt)) == text, "what was kept is still there"
