"""Every topic: its name, key, partitions and retention. `headrace topics ensure` makes the log match."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from schemas.errors import HeadraceError
from schemas.reasons import Reason

INTERACTIVE, BATCH, SHADOW = "interactive", "batch", "shadow"
TIERS = (INTERACTIVE, BATCH, SHADOW)

TOKENS = "tokens"
ANSWERS = "answers"
LIFECYCLE = "lifecycle"
CONTROL = "control"
DOORS = "doors"
WORKERS = "workers"
TENANTS = "tenants"
REGISTRY = "registry"
SCHEMAS = "schemas"
DEAD_LETTERS = "dead-letters"
DEFAULTS = "*"
"""In the place of a tenant's name: what holds for tenants that have nothing of their own."""
TOKENS_PATTERN = r"^tokens(\.[A-Za-z0-9_-]+)?$"

GRANT_HEADER = "grant"
TIMEOUT_HEADER = "timeout-ms"
"""On a record in `requests.*`: the deadline from now, as a decimal number. The shorter of this and the request's own holds."""
CACHE_HEADER = "cache-key"
"""On a record in `answers` that may go to the response cache."""
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
KEY_KEPT_MS = DAY_MS
"""How long an idempotency key is remembered, from the moment at which its request was asked."""

WORK_TOPICS_KEPT = 4_096
"""Of so many model versions and tiers the topic's name is remembered: it is asked for several times a request."""
INLINE_MAX_BYTES = 768 * 1024
"""The largest event that travels inside a record; a larger one of a tenant's goes by the object store (`schemas/payloads.py`)."""
REQUEST_MAX_BYTES = 8 * 1024 * 1024
"""The largest payload that is taken at all."""
ANSWER_MAX_BYTES = 32 * 1024 * 1024
"""The largest answer that is told whole; all that is told so is kept."""
RECORD_MAX_BYTES = 2 * 1024 * 1024
"""The largest record a topic takes: an inline payload in its least compact encoding, and its headers."""

PLAIN = {"compression.type": "uncompressed"}
"""For topics that others write: the broker undoes what a producer compressed, since Python's readers know gzip alone."""

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """One topic as it should be. `retention_ms` None keeps records for ever; `compacted` keeps the last of each key."""

    name: str
    partitions: int
    key: str
    retention_ms: int | None = None
    compacted: bool = False
    config: dict[str, str] = field(default_factory=dict)


def requests_topic(tier: str) -> str:
    """The topic that takes a tier's requests."""
    return f"requests.{tier}"


def ledger_topic(tier: str) -> str:
    """The topic that holds what the tenants' ledgers of a tier were, so that admission needn't read `lifecycle` from its beginning."""
    return f"ledger.{tier}"


def idempotency_topic(tier: str) -> str:
    """The topic that remembers under which keys a tier's requests were asked."""
    return f"idempotency.{tier}"


def tenant_tokens_topic(tenant: str) -> str:
    """The topic that holds a direct producer's answers."""
    return f"tokens.{check_word('tenant', tenant)}"


@lru_cache(maxsize=WORK_TOPICS_KEPT)
def work_topic(model: str, version: str, tier: str) -> str:
    """The topic that holds a model version's work of one tier. The version has no dot, so the name reads back in one way."""
    return f"work.{check_model(model)}.{check_word('version', version)}.{tier}"


def check_model(model: str) -> str:
    """The model's name, if it can be part of a topic's; raises HeadraceError (invalid_request) otherwise."""
    if not _MODEL.fullmatch(model):
        raise HeadraceError(
            Reason.INVALID_REQUEST,
            "a model's name has 1 to 100 letters, digits, '.', '_' or '-', and starts with one of the first two",
            param="model",
        )
    return model


def check_word(param: str, word: str) -> str:
    """A tenant's or version's name, if it can be part of a topic's; raises HeadraceError (invalid_request) otherwise."""
    if not _WORD.fullmatch(word):
        raise HeadraceError(
            Reason.INVALID_REQUEST,
            f"a {param}'s name has 1 to 63 letters, digits, '_' or '-', and starts with one of the first two",
            param=param,
        )
    return word


@dataclass(frozen=True, slots=True)
class PartitionCounts:
    """How many partitions each kind of topic has. `requests` counts for `lifecycle`, `ledger.*` and `idempotency.*` too: all are keyed by tenant."""

    requests: int = 4
    tokens: int = 8
    answers: int = 4

    @classmethod
    def of(cls, there: Mapping[str, int], named: Mapping[str, int]) -> PartitionCounts:
        """Those that are `named`, by field; else those of the topics that are `there`, else the usual ones."""
        found = {
            kind: there[topic]
            for kind, topic in (("requests", LIFECYCLE), ("tokens", TOKENS), ("answers", ANSWERS))
            if topic in there
        }
        return cls(**{**found, **named})


def core_topics(counts: PartitionCounts = PartitionCounts()) -> tuple[TopicSpec, ...]:
    """The topics that exist whatever models are served."""
    return (
        *(TopicSpec(requests_topic(tier), counts.requests, "tenant", 7 * DAY_MS, config=PLAIN) for tier in TIERS),
        TopicSpec(TOKENS, counts.tokens, "request id; the partition is the grant's", 2 * HOUR_MS),
        TopicSpec(ANSWERS, counts.answers, "request id", 7 * DAY_MS),
        TopicSpec(LIFECYCLE, counts.requests, "tenant", 30 * DAY_MS),
        *(TopicSpec(ledger_topic(tier), counts.requests, "tenant and writer", compacted=True) for tier in TIERS),
        *(TopicSpec(idempotency_topic(tier), counts.requests, "tenant", KEY_KEPT_MS) for tier in TIERS),
        TopicSpec(CONTROL, 1, "request id", HOUR_MS),
        TopicSpec(DOORS, 1, "door", HOUR_MS),
        TopicSpec(WORKERS, 1, "worker id", compacted=True),
        TopicSpec(TENANTS, 1, "tenant", compacted=True),
        TopicSpec(REGISTRY, 1, "model"),
        TopicSpec(SCHEMAS, 1, "fingerprint", compacted=True),
        TopicSpec(DEAD_LETTERS, 1, "source topic", 30 * DAY_MS),
    )


def model_topics(
    model: str, version: str, tiers: tuple[str, ...], partitions: int, longest_deadline_ms: int
) -> tuple[TopicSpec, ...]:
    """The work topics of one model version, one a tier."""
    return tuple(
        TopicSpec(work_topic(model, version, tier), partitions, "chosen partition", longest_deadline_ms + DAY_MS)
        for tier in tiers
    )


def tenant_topic(tenant: str, partitions: int = 1) -> TopicSpec:
    """The topic that a direct producer of this tenant reads its answers from."""
    return TopicSpec(tenant_tokens_topic(tenant), partitions, "request id; the partition is the grant's", 2 * HOUR_MS)
