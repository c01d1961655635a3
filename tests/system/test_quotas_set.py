"""Quotas as an operator sets them on the command line: they hold from then on, by default, by key and by model, and all who tell of them agree."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cli.registry import DEFAULT_TIERS, add_key, new_key, now_ms, read_tenant, write_tenant
from schemas.events import Quota
from tests.system.running import MODEL, RunningStack
from tests.system.test_quotas import body, post, tenant

pytestmark = pytest.mark.timeout(180)
MINUTE_S = 60
ROUNDED_S = 2
"""What a wait may be over a minute: ledgers count by the second, and headers tell whole ones."""
ON_TIER = ("--tier", "interactive")
HEARD_S = 20.0
HEARD_BY_ALL_S = 2.0
"""So long at most it takes until admission has heard of a quota that is set."""


def set_quota(stack: RunningStack, *arguments: str) -> None:
    stack.command("tenants", "set-quota", *arguments, *ON_TIER)


@contextmanager
def default_quota(stack: RunningStack, *limits: str) -> Iterator[None]:
    """A default quota while the block runs."""
    scope = limits[: limits.index("--requests-per-minute")]
    set_quota(stack, "--default", *limits)
    try:
        yield
    finally:
        set_quota(stack, "--default", *scope, "--remove")


def second_key(stack: RunningStack, name: str) -> tuple[str, str]:
    """One more key of a tenant's, and its id."""
    key, kept = new_key(DEFAULT_TIERS, now_ms())

    async def write() -> None:
        await write_tenant(stack.kafka, add_key(await read_tenant(stack.kafka, name), kept))

    stack.thread.run(write())
    return key, kept.key_id


def status(stack: RunningStack, key: str, model: str = MODEL) -> int:
    return post(stack, key, body(model)).status_code


def served(stack: RunningStack, key: str, model: str = MODEL) -> bool:
    return status(stack, key, model) == httpx.codes.OK


def refused(stack: RunningStack, key: str, model: str = MODEL) -> httpx.Response:
    """What a call is told that is over a limit, as soon as the limit is known."""

    def look() -> httpx.Response | None:
        answer = post(stack, key, body(model))
        return answer if answer.status_code == httpx.codes.TOO_MANY_REQUESTS else None

    found: httpx.Response = stack.until(look, HEARD_S)
    assert found.json()["error"]["code"] == "rate_limited"
    return found


def known(stack: RunningStack, key: str) -> None:
    """Returns when the front door knows a key."""
    stack.until(lambda: status(stack, key) != httpx.codes.UNAUTHORIZED, HEARD_S)


def usage(stack: RunningStack, name: str, scope: str = "") -> dict[str, dict[str, Any]]:
    """What `headrace tenants usage` says of each limit of a scope."""
    lines = stack.command("tenants", "usage", name, *ON_TIER, "--json").stdout.splitlines()
    (found,) = [row for row in map(json.loads, lines) if row["scope"] == scope]
    return {limit["kind"]: limit for limit in found["limits"]} | {"all": found}


def test_one_that_is_set_refuses_the_next_call_and_one_that_is_lifted_none(stack: RunningStack) -> None:
    """What went before counts, and headers, `usage` and the wait that is told are the same."""
    key = tenant(stack, "set-later")
    began_s = time.time()
    answers = [post(stack, key, body(MODEL)) for _ in range(2)]
    first_s_max = time.time()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert not [name for name in answers[-1].headers if name.startswith("x-ratelimit")]
    for answer in answers:
        stack.ended(answer.headers["x-request-id"])
    spent = sum(answer.json()["usage"]["total_tokens"] for answer in answers)

    set_quota(stack, "set-later", "--requests-per-minute", "2", "--tokens-per-minute", "5000")
    time.sleep(HEARD_BY_ALL_S)
    asked_s = time.time()
    told = post(stack, key, body(MODEL))
    assert told.status_code == httpx.codes.TOO_MANY_REQUESTS
    wait_s = int(told.headers["retry-after"])
    assert began_s + MINUTE_S <= time.time() + wait_s
    assert asked_s + wait_s <= first_s_max + MINUTE_S + ROUNDED_S
    limits = usage(stack, "set-later")
    for unit, left in (("requests", 0), ("tokens", 5_000 - spent)):
        limit = limits[f"{unit}_per_minute"]
        assert limit["limit"] == int(told.headers[f"x-ratelimit-limit-{unit}"])
        assert limit["remaining"] == int(told.headers[f"x-ratelimit-remaining-{unit}"]) == left, unit
        reset_s = float(told.headers[f"x-ratelimit-reset-{unit}"].removesuffix("s").replace("1m", "60") or 0)
        assert abs(asked_s + reset_s - (limits["all"]["at_ms"] + limit["reset_ms"]) / 1_000) <= ROUNDED_S, unit
    assert (limits["all"]["requests"], limits["all"]["tokens"]) == (2, spent)

    set_quota(stack, "set-later", "--remove")
    stack.until(lambda: served(stack, key), HEARD_S)
    assert not [name for name in post(stack, key, body(MODEL)).headers if name.startswith("x-ratelimit")]


def test_a_key_and_each_model_have_counts_of_their_own(stack: RunningStack, narrow: str) -> None:
    key = tenant(stack, "by-key")
    other, other_id = second_key(stack, "by-key")
    known(stack, other)
    set_quota(stack, "by-key", "--key", other_id, "--requests-per-minute", "1")
    assert served(stack, other)
    told = refused(stack, other)
    assert (told.headers["x-ratelimit-limit-requests"], told.headers["x-ratelimit-remaining-requests"]) == ("1", "0")
    assert usage(stack, "by-key", f"key {other_id}")["requests_per_minute"]["remaining"] == 0
    assert [status(stack, key) for _ in range(3)] == [200] * 3, "the tenant's other key has no such limit"
    set_quota(stack, "by-key", "--key", other_id, "--remove")
    stack.until(lambda: served(stack, other), HEARD_S)

    set_quota(stack, "by-key", "--model", "*", "--requests-per-minute", "1")
    for model in (MODEL, narrow):
        assert served(stack, key, model), "each model has its own count"
        refused(stack, key, model)
        refused(stack, other, model)
        assert usage(stack, "by-key", f"model {model}")["requests_per_minute"]["spent"] == 1


def test_a_default_one_holds_for_who_has_none_and_for_nobody_else(stack: RunningStack) -> None:
    key = tenant(stack, "by-default")
    other, other_id = second_key(stack, "by-default")
    with_own = tenant(stack, "with-own", Quota("interactive", requests_per_minute=1_000))
    without_limit = tenant(stack, "without-limit", Quota("interactive"))
    with (
        default_quota(stack, "--requests-per-minute", "3"),
        default_quota(stack, "--key", "*", "--requests-per-minute", "2"),
    ):
        assert [status(stack, key) for _ in range(3)] == [200, 200, 429], "each key has two"
        assert [status(stack, other) for _ in range(2)] == [200, 429], "and all keys together have three"
        told = refused(stack, other)
        assert told.headers["x-ratelimit-limit-requests"] == "3", "what has least left is told"
        limits = usage(stack, "by-default")
        assert limits["all"]["quota"] == "default"
        assert limits["requests_per_minute"]["remaining"] == 0
        assert usage(stack, "by-default", f"key {other_id}")["requests_per_minute"]["remaining"] == 1
        free = [post(stack, each, body(MODEL)) for each in (with_own, without_limit) for _ in range(4)]
        assert [answer.status_code for answer in free] == [200] * 8
        assert free[0].headers["x-ratelimit-limit-requests"] == "1000"
        assert "x-ratelimit-limit-requests" not in free[-1].headers
    stack.until(lambda: served(stack, key) and served(stack, other), HEARD_S)
