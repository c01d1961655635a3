"""Answers, what they answer, and requests that look for them in the response cache, for tests."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from decisions import cache
from decisions.admission import BEFORE_TOKENISING, PLACING, RESOLVING
from decisions.cache import (
    Entry,
)
from decisions.cases import Case, Refusal, judge, tokenised
from decisions.verdicts import named_for_cache
from schemas.events import (
    ChoiceAnswer,
    InferenceAnswered,
    InferenceScheduled,
    ModelVersionRegistered,
    Reply,
    Sampling,
    Usage,
)
from schemas.ids import request_id
from tests.decisions.worlds import ID, NOW, FakeWorld, worker

GREEDY = Sampling(temperature=0.0, max_tokens=10)
VERSION = ModelVersionRegistered("m", "v1", "scripted", "", 100, partitions=4, cache_ttl_ms=60_000)
OTHER_ID = request_id(NOW - 5_000, b"0123456789")
PROMPT = (104, 105)
WORK = InferenceScheduled(
    ID, "acme", "m", "v1", "interactive", PROMPT, GREEDY, NOW + 5_000, NOW, Reply("tokens", 1), "salt"
)


def answer(text: str = "hello", **changes: Any) -> InferenceAnswered:
    ids = tuple(text.encode())
    whole = InferenceAnswered(
        OTHER_ID,
        "acme",
        "m",
        "v1",
        "batch",
        (ChoiceAnswer(0, ids, text, "stop"),),
        Usage(2, len(ids)),
        cache_key="k",
    )
    return replace(whole, **changes)


def world(**changes: Any) -> FakeWorld:
    found = FakeWorld(seen=[worker("a", {0: 0, 1: 0}), worker("b", {2: 0, 3: 0})])
    found.models["m"] = replace(VERSION, **changes)
    return found


def decide(asked: Case, at: FakeWorld, entry: Entry | None = None) -> tuple[Case, Refusal | None]:
    """What the shell does: it looks the answer up between the checks."""
    found, refusal = judge(asked, at, BEFORE_TOKENISING)
    if refusal is None:
        found, refusal = judge(tokenised(found, PROMPT, 257), at, RESOLVING)
    if refusal is not None:
        return found, refusal
    found = named_for_cache(found)
    if found.cache_key and found.policy.read:
        found = replace(found, entry=entry)
    return judge(found, at, PLACING)


def key(work: InferenceScheduled, version: ModelVersionRegistered) -> str:
    return cache.key({item.name: getattr(work, item.name) for item in dataclasses.fields(work)}, version)


def noted(found: Case) -> tuple[str, str]:
    (decision,) = [decision for decision in found.decisions if decision.check == "cache"]
    return decision.outcome, decision.detail


def of_age(ms: int) -> Entry:
    return Entry(answer(), NOW - ms)
