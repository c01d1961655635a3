"""A made world and a made request for tests of admission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decisions.cases import Case
from decisions.ledger import Counter, Counters
from schemas.events import (
    ApiKey,
    InferenceRequested,
    Message,
    ModelVersionRegistered,
    PartitionReport,
    Position,
    Reply,
    Sampling,
    TenantChanged,
    WorkerReported,
)
from schemas.topics import TOKENS

NOW = 1_800_000_000_000
ID = "01900000-0000-7000-8000-000000000000"
WORK = "work.m.v1.interactive"


@dataclass(frozen=True)
class FakeGrant:
    tenant: str = "acme"
    key_id: str = "k1"
    tiers: tuple[str, ...] = ("interactive",)
    reply: Reply = field(default_factory=lambda: Reply(TOKENS, 1))
    expires_ms: int = NOW + 1


@dataclass(frozen=True)
class Seen:
    report: WorkerReported
    seen_ms: int


def worker(
    worker_id: str,
    partitions: Mapping[int, int],
    *,
    slots: int = 4,
    running: int = 0,
    state: str = "ready",
    seen_ms: int = NOW,
    topic: str = WORK,
    service_ms: float = 0.0,
    started_ms: int = 0,
    tiers: tuple[str, ...] = (),
) -> Seen:
    """A worker that has committed up to these offsets of its partitions."""
    held = tuple(PartitionReport(topic, partition, committed, 0) for partition, committed in partitions.items())
    report = WorkerReported(
        worker_id, "m", "v1", state, held, slots, running, 0, service_ms=service_ms, started_ms=started_ms, tiers=tiers
    )
    return Seen(report, seen_ms)


@dataclass
class FakeWorld:
    tenants: dict[str, TenantChanged] = field(
        default_factory=lambda: {
            "acme": TenantChanged("acme", "salt", (ApiKey("k1", "0" * 64, ("interactive", "batch"), 0),), 0)
        }
    )
    models: dict[str, ModelVersionRegistered] = field(
        default_factory=lambda: {
            "m": ModelVersionRegistered("m", "v1", "scripted", "", 100, partitions=4, default_timeout_ms=5_000)
        }
    )
    topics: dict[str, int] = field(default_factory=lambda: {TOKENS: 8, "tokens.acme": 1, WORK: 4})
    seen: list[Seen] = field(default_factory=list)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    start_up: int | None = None
    used: dict[tuple[int, str], dict[str, Counter]] = field(default_factory=dict)
    """By partition and tenant, the counters."""
    under_way: dict[str, int] = field(default_factory=dict)
    """By tenant, the requests that are admitted and haven't ended."""

    waits: int = 0
    """Requests that were let in and no worker has begun."""

    def queued(self, _model: str, _version: str) -> int:
        return self.waits

    def start_up_ms(self, _model: str, _version: str) -> int | None:
        return self.start_up

    def tenant(self, name: str) -> TenantChanged | None:
        return self.tenants.get(name)

    def stable(self, model: str) -> ModelVersionRegistered | None:
        return self.models.get(model)

    def workers(self, model: str, version: str) -> Sequence[Seen]:
        return self.seen

    def partitions(self, topic: str) -> int | None:
        return self.topics.get(topic)

    def open_requests(self, partition: int, tenant: str, model: str, version: str) -> int:
        return self.under_way.get(tenant, 0)

    def counters(self, partition: int, tenant: str) -> Counters:
        return self.used.get((partition, tenant), {})


def case(*, grant: FakeGrant | None = None, sampling: Sampling | None = None, **changes: Any) -> Case:
    """A request that passes every check in a `FakeWorld`."""
    request = InferenceRequested(ID, "m", messages=(Message("user", "hi"),), sampling=sampling or Sampling())
    source = Position("requests.interactive", 2, 7)
    return Case(replace(request, **changes), grant or FakeGrant(), "interactive", NOW, source)
