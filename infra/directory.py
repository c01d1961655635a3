"""What the log says of tenants, models and workers, held in memory and kept up to date.

Lookups are dictionary accesses. Each directory is a `View`: `start()` it before use, `stop()` it at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from aiokafka import ConsumerRecord

from infra.settings import KafkaSettings
from infra.views import View
from schemas.events import (
    ApiKey,
    Event,
    ModelPromoted,
    ModelVersionRegistered,
    TenantChanged,
    WorkerReported,
)
from schemas.topics import HOUR_MS, REGISTRY, TENANTS, WORKERS

WORKER_FORGOTTEN_MS = HOUR_MS
STOPPED = "stopped"


class TenantDirectory(View):
    """Tenants by name and by the hash of a key."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings, TENANTS, self._on_event, self._on_removed)
        self._tenants: dict[str, TenantChanged] = {}
        self._keys: dict[str, tuple[TenantChanged, ApiKey]] = {}

    def tenant(self, name: str) -> TenantChanged | None:
        """A tenant's present state, or None."""
        return self._tenants.get(name)

    def all(self) -> list[TenantChanged]:
        """Every tenant, by name."""
        return [self._tenants[name] for name in sorted(self._tenants)]

    def by_key_hash(self, sha256_hex: str) -> tuple[TenantChanged, ApiKey] | None:
        """The tenant and key with this SHA-256. Revoked keys and disabled tenants are found too: look at them."""
        return self._keys.get(sha256_hex)

    def _on_event(self, event: Event, record: ConsumerRecord) -> None:
        if isinstance(event, TenantChanged):
            event = replace(event, keys=tuple(_revoked_by(key, record.timestamp) for key in event.keys))
            self._forget(event.tenant)
            self._tenants[event.tenant] = event
            self._keys.update((key.sha256, (event, key)) for key in event.keys)

    def _on_removed(self, name: str) -> None:
        self._forget(name)

    def _forget(self, name: str) -> None:
        before = self._tenants.pop(name, None)
        for key in before.keys if before is not None else ():
            if self._keys.get(key.sha256, (None,))[0] is before:  # not one that another tenant has by now
                del self._keys[key.sha256]


def _revoked_by(key: ApiKey, told_ms: int) -> ApiKey:
    """A key as its record tells of it: who revoked it may have a clock that is ahead, and it is void from when that was told, at the latest."""
    if key.revoked_ms is None or key.revoked_ms <= told_ms:
        return key
    return replace(key, revoked_ms=told_ms)


class ModelDirectory(View):
    """Registered versions, and which of them a model's name stands for."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings, REGISTRY, self._on_event)
        self._versions: dict[str, dict[str, ModelVersionRegistered]] = {}
        self._stable: dict[str, str] = {}

    def resolve(self, model: str) -> ModelVersionRegistered | None:
        """The stable version: the one promoted last. None for a model of which none was promoted."""
        return self._versions.get(model, {}).get(self._stable.get(model, ""))

    def version(self, model: str, version: str) -> ModelVersionRegistered | None:
        """One version, promoted or not."""
        return self._versions.get(model, {}).get(version)

    def versions(self, model: str) -> list[ModelVersionRegistered]:
        """A model's versions in the order in which they were first registered."""
        return list(self._versions.get(model, {}).values())

    def all(self) -> list[ModelVersionRegistered]:
        """Every model's stable version, by model name."""
        found = (self.resolve(model) for model in sorted(self._versions))
        return [version for version in found if version is not None]

    def _on_event(self, event: Event, _record: ConsumerRecord) -> None:
        if isinstance(event, ModelVersionRegistered):
            self._versions.setdefault(event.model, {})[event.version] = event
        elif isinstance(event, ModelPromoted):
            self._stable[event.model] = event.version


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker's last report and the timestamp of its record."""

    report: WorkerReported
    seen_ms: int


class WorkerDirectory(View):
    """The latest report of each worker. One that stopped, or was silent for `WORKER_FORGOTTEN_MS`, is forgotten."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings, WORKERS, self._on_event, self._on_removed)
        self._workers: dict[str, SeenWorker] = {}
        self._serving: dict[tuple[str, str], tuple[SeenWorker, ...]] = {}
        self._start_ups: dict[tuple[str, str], tuple[int, int]] = {}
        """Of each version: when the worker began that began last, and how long it took."""
        self._swept_ms = 0

    def worker(self, worker_id: str) -> SeenWorker | None:
        """One worker, or None."""
        return self._workers.get(worker_id)

    def all(self) -> list[SeenWorker]:
        """Every worker, by id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def serving(self, model: str, version: str) -> tuple[SeenWorker, ...]:
        """The workers of a version, by id. Asked several times for each request, so it is kept until one of them tells something new."""
        if (found := self._serving.get((model, version))) is None:
            told = (worker for worker in self.all() if (worker.report.model, worker.report.version) == (model, version))
            found = self._serving[model, version] = tuple(told)
        return found

    def start_up_ms(self, model: str, version: str) -> int | None:
        """How long the worker of a version that began last took to be ready, remembered when none is left; None if none was heard of."""
        return self._start_ups.get((model, version), (0, None))[1]

    def _on_event(self, event: Event, record: ConsumerRecord) -> None:
        if not isinstance(event, WorkerReported):
            return
        self._serving.clear()
        key, told = (event.model, event.version), (event.started_ms, event.start_up_ms)
        if event.start_up_ms and told >= self._start_ups.get(key, (0, 0)):
            self._start_ups[key] = told
        if event.state == STOPPED:
            self._workers.pop(event.worker_id, None)
        else:
            self._workers[event.worker_id] = SeenWorker(event, record.timestamp)
        if record.timestamp - self._swept_ms > WORKER_FORGOTTEN_MS // 60:
            self._swept_ms = record.timestamp
            self._drop(
                worker_id
                for worker_id, worker in self._workers.items()
                if record.timestamp - worker.seen_ms > WORKER_FORGOTTEN_MS
            )

    def _on_removed(self, worker_id: str) -> None:
        self._serving.clear()
        self._workers.pop(worker_id, None)

    def _drop(self, worker_ids: Iterable[str]) -> None:
        for worker_id in list(worker_ids):
            del self._workers[worker_id]
