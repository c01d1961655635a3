"""No limit is passed while all who keep it are killed, frozen, woken and stopped under load: two front doors, two admissions."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from infra.kafka import make_admin
from schemas.events import Quota
from schemas.topics import INTERACTIVE, requests_topic
from tests.system.audit import Audit, Mark
from tests.system.chaos_plan import ADMISSIONS, BRIDGES
from tests.system.fragile import CHAOS, Fragile, running
from tests.system.running import RunningStack
from tests.system.test_quotas import CALL_S_MAX, Ledger, body, ledgers, tenant, told

CALLS, TENANTS, AT_ONCE = 2_000, 20, 48
LAST = 300
"""Calls that are begun with the last blow."""
FROZEN_S = 9.0
DOOR_LOOK_S = 0.1
SEED = 5
READY_S_MAX = 120.0


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    with running(tmp_path_factory.mktemp("quotas")) as fragile:
        yield fragile


def quotas_of(number: int) -> tuple[Quota, ...]:
    """Some tenants can spend less than they ask for, some may do little at once, some both, some little in a minute, some have no limit."""
    tokens, at_once = 3_000 + 400 * (number % 4), 2 + number % 3
    match number % 5:
        case 0:
            return (Quota("interactive", tokens_per_day=tokens),)
        case 1:
            return (Quota("interactive", concurrent_requests=at_once),)
        case 2:
            return (
                Quota("interactive", tokens_per_day=tokens),
                Quota("interactive", key_id="*", concurrent_requests=at_once),
            )
        case 3 if number % 2:
            return (Quota("interactive", tokens_per_minute=2_000),)
        case 3:
            return (Quota("interactive", requests_per_minute=25),)
        case _:
            return ()


class Load:
    """Calls of all tenants over all front doors, some of them given up by their callers in mid-answer. The last `kept` aren't begun."""

    def __init__(self, fragile: Fragile, keys: dict[str, str]) -> None:
        self.statuses: Counter[int] = Counter()
        self.done = 0
        self.kept = LAST
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
            if len(self._calls) <= self.kept:
                await asyncio.sleep(DOOR_LOOK_S)
                continue
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


def deciders(stack: RunningStack) -> dict[int, str]:
    """By partition of the requests, the member of admission's group that has it; without those that are nobody's yet."""

    async def look() -> dict[int, str]:
        admin = make_admin(stack.kafka)
        await admin.start()
        try:
            (answer,) = await admin.describe_consumer_groups([f"admission.{INTERACTIVE}"])
        finally:
            await admin.close()
        (group,) = answer.to_object()["groups"]
        found: dict[int, str] = {}
        for member in group["members"]:
            if told := member["member_assignment"]:
                given = dict(ConsumerProtocolMemberAssignment.decode(told).assignment)
                found |= dict.fromkeys(given.get(requests_topic(INTERACTIVE), ()), member["member_id"])
        return found

    return stack.thread.run(look())


def assert_kept(quota: Quota, ledger: Ledger, name: str) -> None:
    """Nothing was over a limit at any moment, and what is spent was limited by it: the next had no room."""
    assert ledger.most_running <= (quota.concurrent_requests or ledger.most_running), name
    if quota.tokens_per_day:
        assert quota.tokens_per_day - ledger.largest < ledger.most_tokens <= quota.tokens_per_day, name
    if quota.requests_per_minute:
        assert ledger.most_requests_a_minute == quota.requests_per_minute, name
    if quota.tokens_per_minute:
        least = quota.tokens_per_minute - ledger.largest
        assert least < ledger.most_tokens_a_minute <= quota.tokens_per_minute, name


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
    first = deciders(stack)
    assert len(set(first.values())) == len(ADMISSIONS), first
    stack.kill(ADMISSIONS[0])
    at(0.3)
    stack.pause(ADMISSIONS[1])
    frozen_s = time.monotonic()
    at(0.45)
    time.sleep(max(0.0, frozen_s + FROZEN_S - time.monotonic()))
    # All are another's now: the one was killed, and the other's session has ended.
    stack.until(lambda: (now := deciders(stack)).keys() == first.keys() and not {*now.values()} & {*first.values()})
    stack.resume(ADMISSIONS[1])
    at(0.55)
    stack.kill(BRIDGES[0])
    at(0.7)
    stack.restart(ADMISSIONS[0])
    load.kept = 0
    stack.kill(ADMISSIONS[1])
    assert load.done < CALLS
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
            assert_kept(quota, ledger, name)
        (usage,) = told(stack, name)
        assert (usage["tokens"], usage["running"], usage["reserved_tokens"]) == (ledger.spent, 0, 0), name
    assert load.statuses[200] > CALLS / 4, load.statuses
    assert load.statuses[429] > CALLS / 20, load.statuses


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
