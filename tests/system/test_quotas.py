"""Quotas on the running system: nothing is spent over a limit, whatever is killed; what ends gives back; refusals say when to come again."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from cli.registry import DEFAULT_TIERS, add_key, new_key, new_tenant, now_ms, write_tenant
from schemas.events import InferenceAdmitted, InferenceCompleted, InferenceFailed, InferenceRejected, Quota
from tests.system.audit import Audit, Mark
from tests.system.running import MODEL, RunningStack, script

CALL_S_MAX = 60.0
GIVEN_BACK_S = 5.0
MINUTE_MS = 60_000


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
    """A tenant's ledger as an outsider reads it off `lifecycle`, record by record.

    `charges` are by request: when it was asked, and what it reserves or has used.
    """

    reserved: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    spent: int = 0
    largest: int = 0
    most_tokens: int = 0
    most_running: int = 0
    charges: dict[str, tuple[int, int]] = field(default_factory=dict)
    most_tokens_a_minute: int = 0
    most_requests_a_minute: int = 0

    def tell(self, event: Any) -> None:
        match event:
            case InferenceAdmitted() if event.request_id not in self.seen:
                self.seen.add(event.request_id)
                self.reserved[event.request_id] = event.reserved_tokens
                self.largest = max(self.largest, event.reserved_tokens)
                self.charges[event.request_id] = event.requested_ms, event.reserved_tokens
                self.see_the_minute_until(event.requested_ms)
            case InferenceRejected():
                if self.reserved.pop(event.request_id, None) is not None:
                    del self.charges[event.request_id]
            case InferenceCompleted() | InferenceFailed():
                self.seen.add(event.request_id)
                if self.reserved.pop(event.request_id, None) is not None:
                    usage = event.usage
                    used = usage.prompt_tokens + usage.completion_tokens if usage is not None else 0
                    self.spent += used
                    self.charges[event.request_id] = self.charges[event.request_id][0], used
        self.most_tokens = max(self.most_tokens, self.spent + sum(self.reserved.values()))
        self.most_running = max(self.most_running, len(self.reserved))

    def see_the_minute_until(self, now_ms: int) -> None:
        """A charge counts for 60 s from its own moment on."""
        counts = [tokens for since_ms, tokens in self.charges.values() if since_ms > now_ms - MINUTE_MS]
        self.most_tokens_a_minute = max(self.most_tokens_a_minute, sum(counts))
        self.most_requests_a_minute = max(self.most_requests_a_minute, len(counts))


def ledgers(mark: Mark) -> dict[str, Ledger]:
    found: dict[str, Ledger] = defaultdict(Ledger)
    for item in mark.records():
        if isinstance(item.event, InferenceAdmitted | InferenceRejected | InferenceCompleted | InferenceFailed):
            found[item.event.tenant].tell(item.event)
    return found


def told(stack: RunningStack, name: str, tier: str = "interactive") -> list[dict[str, Any]]:
    """What `headrace tenants usage` says of a tenant as a whole."""
    lines = stack.command("tenants", "usage", name, "--tier", tier, "--json").stdout.splitlines()
    return [found for found in map(json.loads, lines) if found["scope"] == ""]


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


@pytest.mark.parametrize(
    "misfortune", [leave_in_the_middle, ask_nonsense, fail], ids=lambda function: function.__name__
)
def test_one_at_once_is_served_again_soon_after(
    stack: RunningStack, misfortune: Callable[[RunningStack, str], None]
) -> None:
    """What a lost front door leaves behind is `test_presence`'s."""
    key = tenant(stack, misfortune.__name__.replace("_", "-"), Quota("interactive", concurrent_requests=1))
    assert served_soon(stack, key)
    stack.until(lambda: served_soon(stack, key), GIVEN_BACK_S)
    misfortune(stack, key)
    stack.until(lambda: served_soon(stack, key), GIVEN_BACK_S)
