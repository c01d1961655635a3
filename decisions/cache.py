"""The response cache: which answers are kept, under which name, who may have one, and how one is told again.

A name is the SHA-256 of everything that can change the answer. It is taken of the work as a worker would get it and of the version that
serves it, field by field: what is named here as without effect is left out, and all else is in, a field that is added later by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import orjson

from decisions import resume
from decisions.ledger import Cost
from decisions.stream import NEW, Input
from schemas.events import (
    GenerationStarted,
    GenerationTakenOver,
    InferenceAnswered,
    InferenceCompleted,
    InferenceScheduled,
    ModelVersionRegistered,
    Sampling,
    TokensGenerated,
)

HIT, MISS, PASSED_OVER = "hit", "miss", "passed over"
BY_CACHE = "cache"
"""Stands in the place of the worker's id where an answer comes from the cache."""
TOKENS_COST = "tokens"
"""The setting by which an answer from the cache costs its tokens, too; any other value: a request alone."""
CONTROL_CHARS_MAX = 1_000
PARSED_MAX = 1_024
"""Of so many it is remembered what they mean: one request's is asked for half a dozen times."""
VERSIONS_MAX = 16
"""Of so many versions it is remembered how their names begin."""
_BEGUN: deque[tuple[ModelVersionRegistered, Any]] = deque(maxlen=VERSIONS_MAX)
ENTRY_BYTES_MAX = 192 * 1024
"""The largest answer that is kept, as it stands in `answers`: told in the least compact encoding, it is still one batch of records."""
CHUNK_TOKENS = 32
CHUNKS_MAX = 64
"""Of a long answer's chunks there are no more a choice: each is as much longer."""
KEPT_MS = 2_000
"""So long after its end may equal work that is sent to the same worker have a generation's answer, until the cache has it."""

WORK_APART = frozenset(
    {
        "request_id",
        "tier",
        "deadline_ms",
        "requested_ms",
        "reply",
        "stream",
        "source",
        "time_limit_ms",
        "rates",
        "cache_key",
        "shared",
    }
)
"""Fields of the work that change nothing in a whole answer."""
VERSION_APART = frozenset(
    {
        "slots",
        "partitions",
        "tiers",
        "default_timeout_ms",
        "created_ms",
        "time_limit_ms",
        "max_queue_depth",
        "interactive_slots",
        "cache_ttl_ms",
        "cache_bytes",
        "cache_hit_cost",
        "batched",
        "fixed_rows",
    }
)
"""Fields of a version that change nothing in a whole answer."""

_SECONDS = re.compile(r"[0-9]{1,12}")

WORK_FIELDS = tuple(item.name for item in dataclasses.fields(InferenceScheduled) if item.name not in WORK_APART)
VERSION_FIELDS = tuple(
    item.name for item in dataclasses.fields(ModelVersionRegistered) if item.name not in VERSION_APART
)
"""What is in a key: all but those, so that whatever is added later is in it, too."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a caller wants of the cache: an answer from it, no older than so long, and its own kept there."""

    read: bool = True
    store: bool = True
    max_age_ms: int | None = None

    @property
    def shares(self) -> bool:
        """Whether equal work in progress may answer, or has just."""
        return self.read and self.store and (self.max_age_ms is None or self.max_age_ms >= KEPT_MS)


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer in the cache, and when it was told."""

    answer: InferenceAnswered
    stored_ms: int


# --- which, and under which name -------------------------------------------------------------------------------------


@lru_cache(maxsize=PARSED_MAX)
def parse(cache_control: str | None) -> Policy:
    """A `Cache-Control` of a request (RFC 9111, 5.2.1). Unknown directives are passed over. Raises ValueError saying what is wrong."""
    policy = Policy()
    if cache_control is None:
        return policy
    if len(cache_control) > CONTROL_CHARS_MAX:
        raise ValueError(f"has {len(cache_control)} characters; at most {CONTROL_CHARS_MAX} are taken")
    for directive in cache_control.split(","):
        name, _, value = (part.strip() for part in directive.partition("="))
        match name.lower():
            case "no-cache":
                policy = replace(policy, read=False)
            case "no-store":
                policy = replace(policy, store=False)
            case "max-age":
                policy = _at_most(policy, value)
            case _:
                pass
    return policy


def _at_most(policy: Policy, value: str) -> Policy:
    seconds = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    if not _SECONDS.fullmatch(seconds):
        raise ValueError("max-age must be a whole number of seconds, as in max-age=60")
    ms = int(seconds) * 1_000
    ms = ms if policy.max_age_ms is None else min(ms, policy.max_age_ms)
    return replace(policy, max_age_ms=ms, read=policy.read and ms > 0)


def deterministic(sampling: Sampling) -> bool:
    """Whether the same request has the same answer."""
    return sampling.temperature == 0


def key(shaping: Mapping[str, Any], version: ModelVersionRegistered) -> str:
    """The name of an answer: 64 hexadecimal digits. `shaping` has the work's fields by name; raises KeyError if one of `WORK_FIELDS` isn't there."""
    made = _begun(version).copy()
    made.update(_json({name: shaping[name] for name in WORK_FIELDS}))
    return str(made.hexdigest())


def _begun(version: ModelVersionRegistered) -> Any:
    """A hash of what is the same in all keys of a version; made once while it is one of the last that were asked for."""
    for known, begun in _BEGUN:
        if known is version:
            return begun
    begun = hashlib.sha256(_json({name: getattr(version, name) for name in VERSION_FIELDS}))
    _BEGUN.append((version, begun))
    return begun


def _json(fields: Mapping[str, Any]) -> bytes:
    """What is in these fields; orjson writes dataclasses itself, in the order of their fields."""
    return orjson.dumps(fields, default=_plain, option=orjson.OPT_SORT_KEYS)


def _plain(value: object) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def may_be_kept(answer: InferenceAnswered, record_bytes: int) -> bool:
    """A finished answer, of a size that the cache takes, whose caller lets it be kept."""
    return bool(answer.cache_key) and answer.error_reason is None and record_bytes <= ENTRY_BYTES_MAX


# --- who may have one, and at what cost ------------------------------------------------------------------------------


def verdict(entry: Entry | None, policy: Policy, ttl_ms: int, now_ms: int) -> tuple[int | None, str]:
    """The age of the entry if it is a hit, else None; and why, in words."""
    if not policy.read:
        return None, "the caller wants a new answer"
    if entry is None:
        return None, "not kept"
    age_ms = max(0, now_ms - entry.stored_ms)
    if age_ms >= ttl_ms:
        return None, f"{age_ms} ms old, and kept for {ttl_ms} ms"
    if policy.max_age_ms is not None and age_ms > policy.max_age_ms:
        return None, f"{age_ms} ms old, and the caller wants at most {policy.max_age_ms} ms"
    return age_ms, f"{age_ms} ms old, of request {entry.answer.request_id}"


def hit_cost(version: ModelVersionRegistered, answer: InferenceAnswered) -> Cost:
    """What an answer from the cache costs its tenant: it runs nowhere."""
    usage = answer.usage
    as_generated = version.cache_hit_cost == TOKENS_COST
    return Cost(usage.prompt_tokens + usage.completion_tokens if as_generated else 0, running=0)


def least_cost(version: ModelVersionRegistered) -> Cost:
    """The least that an answer from the cache can cost."""
    return Cost(1 if version.cache_hit_cost == TOKENS_COST else 0, running=0)


# --- told again ------------------------------------------------------------------------------------------------------


def stream(answer: InferenceAnswered, work: InferenceScheduled, age_ms: int) -> list[Input]:
    """The events by which a request has an answer from the cache: a whole stream, as a worker would have written it.

    Its start carries no name: an answer isn't kept anew because it was asked for, or it would never grow old.
    """
    own = replace(answer, request_id=work.request_id, tier=work.tier)
    found: list[Input] = []
    for event in resume.rest(own, NEW, ()):
        match event:
            case GenerationTakenOver() | InferenceCompleted():
                found.append(replace(event, worker_id=BY_CACHE))
            case GenerationStarted():
                found.append(
                    replace(event, worker_id=BY_CACHE, sampling=work.sampling, rates=work.rates, cache_age_ms=age_ms)
                )
            case TokensGenerated():
                found.extend(chunks(event))
            case _:
                found.append(event)
    return found


def chunks(event: TokensGenerated) -> Iterator[TokensGenerated]:
    """A long piece of an answer as several; the text is cut where the tokens are, by proportion: nobody knows any more which made which."""
    count, text = len(event.token_ids), event.text
    length = max(CHUNK_TOKENS, -(-count // CHUNKS_MAX))
    for first in range(0, max(1, count), length):
        last = min(count, first + length)
        of_text = slice(first * len(text) // count, last * len(text) // count) if count else slice(None)
        yield replace(
            event,
            first=event.first + first,
            token_ids=event.token_ids[first:last],
            text=text[of_text],
            logprobs=None if event.logprobs is None else event.logprobs[first:last],
        )
