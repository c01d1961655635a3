"""Quotas on the running system: nothing is spent over a limit, whatever is killed; what ends gives back; refusals say when to come again."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from cli.registry import DEFAULT_TIERS, add_key, new_key, new_tenant, now_ms, write_tenant
from schemas.events import InferenceAdmitted, InferenceCompleted, InferenceFailed, InferenceRejected, Quota
from tests.system.audit import Audit, Mark
from tests.system.chaos_plan import ADMISSIONS, BRIDGES
from tests.system.fragile import CHAOS, Fragile, running
from tests.system.running import MODEL, RunningStack, script

CALLS, TENANTS, AT_ONCE = 2_000, 20, 48
FROZEN_S = 9.0
DOOR_LOOK_S = 0.1
SEED = 5
CALL_S_MAX = 60.0
GIVEN_BACK_S = 5.0
READY_S_MAX = 120.0


def tenant(stack: RunningStack, name: str, *quotas: Quota) -> str:
    """A new tenant with these quotas; its key."""
    key, kept = new_key(DEFAULT_TIERS, now_ms())
    stack.thread.run(write_tenant(stack.kafka, replace(add_key(new_tenant(name, now_ms()), kept), quotas=quotas)))
    return key


def body(model: str, *, max_tokens: int = 20, stream: bool = False, **directions: Any) -> dict[str, Any]:
    given = {"tokens": ["ab"], "repeat": 8} | {
        name.replace("failure", "raise"): each for name, each in directions.items()
    }
    messages = [{"role": "user", "content": script(**given)}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream}


@dataclass
class Ledger:
    """A tenant's ledger as an outsider reads it off `lifecycle`, record by record."""

    reserved: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    spent: int = 0
    largest: int = 0
    most_tokens: int = 0
    most_running: int = 0

    def tell(self, event: Any) -> None:
        match event:
            case InferenceAdmitted() if event.request_id not in self.seen:
                self.seen.add(event.request_id)
                self.reserved[event.request_id] = event.reserved_tokens
                self.largest = max(self.largest, event.reserved_tokens)
            case InferenceRejected():
                self.reserved.pop(event.request_id, None)
            case InferenceCompleted() | InferenceFailed():
                self.seen.add(event.request_id)
                if self.reserved.pop(event.request_id, None) is not None and event.usage is not None:
                    self.spent += event.usage.prompt_tokens + event.usage.completion_tokens
        self.most_tokens = max(self.most_tokens, self.spent + sum(self.reserved.values()))
        self.most_running = max(self.most_running, len(self.reserved))


def ledgers(mark: Mark) -> dict[str, Ledger]:
    found: dict[str, Ledger] = defaultdict(Ledger)
    for item in mark.records():
        if isinstance(item.event, InferenceAdmitted | InferenceRejected | InferenceCompleted | InferenceFailed):
            found[item.event.tenant].tell(item.event)
    return found


# --- under load, with kills -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    with running(tmp_path_factory.mktemp("quotas")) as fragile:
        yield fragile


def quotas_of(number: int) -> tuple[Quota, ...]:
    """Some tenants can spend less than they ask for, some may do little at once, some both, some have no limit."""
    tokens, at_once = 3_000 + 400 * (number % 5), 2 + number % 3
    match number % 4:
        case 0:
            return (Quota("interactive", tokens_per_day=tokens),)
        case 1:
            return (Quota("interactive", concurrent_requests=at_once),)
        case 2:
            return (
                Quota("interactive", tokens_per_day=tokens),
                Quota("interactive", key_id="*", concurrent_requests=at_once),
            )
        case _:
            return ()


class Load:
    """Calls of all tenants over all front doors, some of them given up by their callers in mid-answer."""

    def __init__(self, fragile: Fragile, keys: dict[str, str]) -> None:
        self.statuses: Counter[int] = Counter()
        self.done = 0
        self._urls = itertools.cycle(fragile.urls())
        self._rng = random.Random(SEED)
        self._calls = [name for name in keys for _ in range(CALLS // TENANTS)]
        self._rng.shuffle(self._calls)
        self._keys = keys

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=CALL_S_MAX, trust_env=False) as http:
            await asyncio.gather(*(self._caller(http) for _ in range(AT_ONCE)))

    async def _caller(self, http: httpx.AsyncClient) -> None:
        while self._calls:
            name, gives_up = self._calls.pop(), self._rng.random() < 0.1
            try:
                self.statuses[await self._reach(http, self._keys[name], gives_up=gives_up)] += 1
            except httpx.TransportError:  # its front door was killed
                self.statuses[0] += 1
            self.done += 1

    async def _reach(self, http: httpx.AsyncClient, key: str, *, gives_up: bool) -> int:
        """A call at the next front door that is there: however long one takes to come back, no call is spent on a closed door."""
        while True:
            try:
                return await self._call(http, key, gives_up=gives_up)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                await asyncio.sleep(DOOR_LOOK_S)

    async def _call(self, http: httpx.AsyncClient, key: str, *, gives_up: bool) -> int:
        asked = body(CHAOS, stream=gives_up, token_ms=10)
        headers = {"authorization": f"Bearer {key}"}
        url = f"{next(self._urls)}/v1/chat/completions"
        async with http.stream("POST", url, json=asked, headers=headers) as answer:
            if not (gives_up and answer.status_code == 200):
                text = await answer.aread()
                assert answer.status_code != 429 or b"rate_limited" in text, text
                assert answer.status_code != 429 or "retry-after" in answer.headers
            else:
                async for _ in answer.aiter_lines():
                    break
            return answer.status_code


@pytest.mark.timeout(420)
def test_no_limit_is_passed_for_a_moment_and_charges_are_what_was_delivered(fragile: Fragile) -> None:
    stack = fragile.stack
    keys = {f"t{number}": tenant(stack, f"t{number}", *quotas_of(number)) for number in range(TENANTS)}
    audit, mark = Audit(stack), Mark(stack, "lifecycle")
    load = Load(fragile, keys)
    running = asyncio.run_coroutine_threadsafe(load.run(), stack.thread.loop)

    def at(share: float) -> None:
        stack.until(lambda: load.done >= share * CALLS or running.done(), CALL_S_MAX * 3)

    at(0.15)
    stack.kill(ADMISSIONS[0])
    at(0.3)
    stack.pause(ADMISSIONS[1])
    frozen_s = time.monotonic()
    at(0.45)
    time.sleep(max(0.0, frozen_s + FROZEN_S - time.monotonic()))
    stack.resume(ADMISSIONS[1])
    at(0.55)
    stack.kill(BRIDGES[0])
    at(0.7)
    stack.restart(ADMISSIONS[0])
    stack.kill(ADMISSIONS[1])
    running.result(CALL_S_MAX * 5)
    fragile.await_ready(READY_S_MAX)

    stories = audit.settled()
    found = ledgers(mark)
    charged: Counter[str] = Counter()
    for story in stories.values():
        assert story.admitted is not None
        prompt = story.admitted.prompt_tokens if story.stream.accepted else 0
        charged[story.admitted.tenant] += prompt + sum(story.stream.accepted)
    for number, name in enumerate(keys):
        ledger = found[name]
        assert not ledger.reserved, (name, ledger.reserved)
        assert ledger.spent == charged[name], name
        for quota in quotas_of(number):
            if quota.tokens_per_day:
                assert ledger.most_tokens <= quota.tokens_per_day, name
                assert ledger.most_tokens > quota.tokens_per_day - ledger.largest, (
                    name
                )  # it was met: the next had no room
            assert ledger.most_running <= (quota.concurrent_requests or ledger.most_running), name
        (usage,) = told(stack, name)
        assert (usage["tokens"], usage["running"], usage["reserved_tokens"]) == (ledger.spent, 0, 0), name
    assert load.statuses[200] > CALLS / 4, load.statuses
    assert load.statuses[429] > CALLS / 20, load.statuses


def told(stack: RunningStack, name: str) -> list[dict[str, Any]]:
    """What `headrace tenants usage` says of a tenant as a whole."""
    lines = stack.command("tenants", "usage", name, "--tier", "interactive", "--json").stdout.splitlines()
    return [found for found in map(json.loads, lines) if found["scope"] == ""]


def test_fifty_calls_of_one_instant_over_two_front_doors_share_a_minute(fragile: Fragile) -> None:
    """litellm#18730, #40095: of a brand-new tenant, and refused ones use up nothing in any limit."""
    stack, calls, limit = fragile.stack, 50, 100
    fragile.await_ready(READY_S_MAX)
    quota = Quota("interactive", requests_per_minute=1_000, tokens_per_minute=limit, tokens_per_day=1_000_000)
    key = tenant(stack, "two-doors", replace(quota, concurrent_requests=calls))
    mark, ready = Mark(stack, "lifecycle"), threading.Barrier(calls)
    urls = itertools.cycle(fragile.urls())

    def call(url: str) -> httpx.Response:
        ready.wait()
        asked = {"model": CHAOS, "prompt": "hello", "max_tokens": 10}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=CALL_S_MAX, trust_env=False)

    with ThreadPoolExecutor(calls) as pool:
        answers = list(pool.map(call, itertools.islice(urls, calls)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == calls
    assert all(1 <= int(answer.headers["retry-after"]) <= 61 for answer in refused)
    assert all(answer.headers["x-ratelimit-limit-tokens"] == str(limit) for answer in answers)

    stack.until(lambda: not ledgers(mark)["two-doors"].reserved)
    ledger = ledgers(mark)["two-doors"]
    assert len(served) >= limit // ledger.largest
    assert ledger.most_tokens <= limit
    assert ledger.spent == sum(answer.json()["usage"]["total_tokens"] for answer in served)
    (usage,) = told(stack, "two-doors")
    assert (usage["requests"], usage["tokens"]) == (len(served), ledger.spent)
    assert (usage["running"], usage["reserved_tokens"]) == (0, 0)
    limits = {found["kind"]: found for found in usage["limits"]}
    assert limits["tokens_per_day"]["spent"] == ledger.spent
    assert all(found["reserved"] == 0 for found in limits.values())


# --- one after another ------------------------------------------------------------------------------------------------


def test_what_is_told_twice_after_kills_is_charged_once(stack: RunningStack, single: str) -> None:
    """faust-streaming#312, robinhood/faust#559: one partition, a slow job before 49 quick ones, and all who handle them are killed.

    Work and endings are committed below the oldest that is open, so each of them tells of the quick ones again.
    """
    key = tenant(stack, "charged")
    audit, mark = Audit(stack), Mark(stack, "lifecycle")
    victims = {name: stack.pid(name) for name in ("single-a", "admission-interactive", "endings")}
    with ThreadPoolExecutor(12) as pool:
        slow = pool.submit(post, stack, key, body(single, repeat=50, token_ms=300, max_tokens=200))
        stack.until(lambda: any(sum(story.stream.accepted) for story in audit.stories().values()))
        quick = list(pool.map(lambda _: post(stack, key, body(single)), range(49)))
        stack.until(lambda: sum(len(story.endings) for story in audit.stories().values()) == 49)
        assert not slow.done()
        for name in victims:
            stack.kill(name)
        answers = [*quick, slow.result(CALL_S_MAX * 2)]
    for name, before in victims.items():
        stack.until_restarted(name, before)
    answers.append(post(stack, key, body(single)))  # what is told again stands before its ending

    assert [answer.status_code for answer in answers] == [200] * 51
    stories = audit.settled()
    assert len(stories) == 51
    assert any(len(story.endings) > 1 for story in stories.values())
    delivered = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
    (usage,) = told(stack, "charged")
    assert (usage["requests"], usage["tokens"]) == (51, delivered)
    assert (usage["running"], usage["reserved_tokens"]) == (0, 0)
    assert ledgers(mark)["charged"].spent == delivered


def post(stack: RunningStack, key: str, asked: dict[str, Any], wait_s: float = CALL_S_MAX) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    url = f"{stack.base_url}/v1/chat/completions"
    return httpx.post(url, json=asked, headers=headers, timeout=wait_s, trust_env=False)


def served_soon(stack: RunningStack, key: str) -> bool:
    return post(stack, key, body(MODEL)).status_code == 200


def test_calls_at_one_instant_share_what_there_is(stack: RunningStack) -> None:
    """A brand-new tenant's first calls, all at once: as many as have room are served, and the others are told when to come again."""
    key = tenant(stack, "instant", Quota("interactive", tokens_per_minute=1_000))
    mark = Mark(stack, "lifecycle")
    ready = threading.Barrier(30)

    def call(_: int) -> httpx.Response:
        ready.wait()
        return post(stack, key, body(MODEL))

    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(call, range(30)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == 30
    assert served and refused
    assert all(1 <= int(answer.headers["retry-after"]) <= 61 for answer in refused)
    assert all(answer.json()["error"]["code"] == "rate_limited" for answer in refused)
    assert all(answer.headers["x-ratelimit-limit-tokens"] == "1000" for answer in answers)
    stack.until(lambda: not ledgers(mark)["instant"].reserved)
    assert 0 < ledgers(mark)["instant"].most_tokens <= 1_000


def leave_in_the_middle(stack: RunningStack, key: str) -> None:
    asked = body(MODEL, stream=True, token_ms=50, repeat=400, max_tokens=900)
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream(
        "POST", f"{stack.base_url}/v1/chat/completions", json=asked, headers=headers, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())


def ask_nonsense(stack: RunningStack, key: str) -> None:
    assert post(stack, key, body(MODEL) | {"temperature": "hot"}).status_code == 400
    assert post(stack, key, body(MODEL, max_tokens=1_000_000)).status_code == 400


def fail(stack: RunningStack, key: str) -> None:
    assert post(stack, key, body(MODEL, failure="error")).status_code in (200, 500)


def lose_the_front_door(stack: RunningStack, key: str) -> None:
    before = stack.pid("bridge")
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(post, stack, key, body(MODEL, token_ms=20, repeat=40, max_tokens=100))
        time.sleep(0.3)
        stack.kill("bridge")
        assert isinstance(calling.exception(), httpx.TransportError)
    stack.until_restarted("bridge", before)


@pytest.mark.parametrize(
    "misfortune", [leave_in_the_middle, ask_nonsense, fail, lose_the_front_door], ids=lambda function: function.__name__
)
def test_one_at_once_is_served_again_soon_after(
    stack: RunningStack, misfortune: Callable[[RunningStack, str], None]
) -> None:
    key = tenant(stack, misfortune.__name__.replace("_", "-"), Quota("interactive", concurrent_requests=1))
    assert served_soon(stack, key)
    stack.until(lambda: served_soon(stack, key), GIVEN_BACK_S)
    misfortune(stack, key)
    stack.until(lambda: served_soon(stack, key), GIVEN_BACK_S)
