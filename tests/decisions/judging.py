"""Requests put through the checks of admission as its shell does, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decisions.admission import AFTER_TOKENISING, BEFORE_TOKENISING
from decisions.cases import Case, Refusal, judge, tokenised
from schemas.events import (
    Quota,
    Sampling,
    TenantChanged,
)
from schemas.topics import DEFAULTS
from tests.decisions.worlds import FakeWorld

PROMPT = (104, 105)


def decide(
    given_case: Case, world: FakeWorld, prompt: tuple[int, ...] = PROMPT, vocab_size: int = 257
) -> tuple[Case, Refusal | None]:
    """What the shell does: one half of the list, the tokens, the other half."""
    found, refusal = judge(given_case, world, BEFORE_TOKENISING)
    if refusal is not None:
        return found, refusal
    return judge(tokenised(found, prompt, vocab_size), world, AFTER_TOKENISING)


def refused(given_case: Case, world: FakeWorld | None = None, **how: Any) -> Refusal:
    found, refusal = decide(given_case, world or FakeWorld(), **how)
    assert refusal is not None
    assert found.decisions[-1].outcome == "refused"
    assert found.decisions[-1].detail == refusal.reason.value
    return refusal


PARTITION = 2
"""Of the requests, as `worlds.case` has it."""
ASKED = Sampling(max_tokens=10)
COST = len(PROMPT) + 10


def limited(*quotas: Quota, default: tuple[Quota, ...] = (), **state: Any) -> FakeWorld:
    """A world in which the tenant, and tenants without quotas of their own, have these limits."""
    world = FakeWorld(**state)
    world.tenants["acme"] = replace(world.tenants["acme"], quotas=quotas)
    world.tenants[DEFAULTS] = TenantChanged(DEFAULTS, "", (), 0, quotas=default)
    return world


def taking(world: FakeWorld, given_case: Case) -> Case:
    """Let a request in, and count it as the shell does."""
    found, refusal = decide(given_case, world)
    assert refusal is None
    assert found.reserved is not None
    world.used.setdefault((PARTITION, "acme"), {}).update(found.reserved.changed)
    return found
