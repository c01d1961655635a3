"""What the compacted topics say now: tenants and model versions, read to the end, changed, and written back whole."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from schemas.errors import HeadraceError
from schemas.events import ApiKey, Event, ModelPromoted, ModelVersionRegistered, TenantChanged
from schemas.reasons import Reason
from schemas.topics import BATCH, INTERACTIVE, REGISTRY, TENANTS, check_word

if TYPE_CHECKING:
    from infra.settings import KafkaSettings

KEY_ID_BYTES = 4
KEY_RANDOM_BYTES = 24
SALT_BYTES = 16
KEYS_MAX = 100
"""Keys that one tenant may have, revoked ones included."""
AT_ONCE_MS = 60_000
"""Two commands that change a tenant within this time may not have seen each other's change."""
MERGES_MAX = 16
SILENT_MS = 30_000
"""A worker that has reported nothing for so long counts as gone: they report every second or so."""
SERVING = ("starting", "ready")
DEFAULT_TIERS = (INTERACTIVE, BATCH)


def now_ms() -> int:
    """The time now, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class Models:
    """The topic `registry`, folded: every version by (model, version), and the version that a model's name goes to."""

    versions: dict[tuple[str, str], ModelVersionRegistered] = field(default_factory=dict)
    stable: dict[str, str] = field(default_factory=dict)

    def apply(self, event: Event, _record: Any = None) -> None:
        """Takes the next event in; those of other kinds change nothing."""
        match event:
            case ModelVersionRegistered():
                self.versions[event.model, event.version] = event
            case ModelPromoted():
                self.stable[event.model] = event.version


async def read_models(settings: KafkaSettings) -> Models:
    """The registry as it is now."""
    from infra.views import View

    models = Models()
    view = View(settings, REGISTRY, models.apply)
    await view.start()
    await view.stop()
    return models


async def count_workers(settings: KafkaSettings, model: str, version: str) -> int:
    """How many workers serve a version, or are starting to: those that have reported it lately and aren't leaving.

    Raises HeadraceError (unavailable) if the topic `workers` can't be read.
    """
    from infra.directory import WorkerDirectory

    directory = WorkerDirectory(settings)
    await directory.start()
    await directory.stop()
    since_ms = now_ms() - SILENT_MS
    return sum(
        worker.seen_ms > since_ms and worker.report.state in SERVING for worker in directory.serving(model, version)
    )


async def read_tenants(settings: KafkaSettings) -> dict[str, TenantChanged]:
    """Every tenant's present state, by name."""
    from infra.directory import TenantDirectory

    directory = TenantDirectory(settings)
    await directory.start()
    await directory.stop()
    return {tenant.tenant: tenant for tenant in directory.all()}


async def read_tenant(settings: KafkaSettings, name: str) -> TenantChanged:
    """One tenant's present state. Raises HeadraceError (not_found)."""
    tenants = await read_tenants(settings)
    if name not in tenants:
        known = ", ".join(sorted(tenants)) or "none yet"
        raise HeadraceError(
            Reason.NOT_FOUND, f"there is no tenant {name!r}; there are: {known} (`headrace tenants create`)"
        )
    return tenants[name]


async def write(settings: KafkaSettings, topic: str, *events: tuple[str, Event]) -> None:
    """Writes (key, event) pairs in this order and returns once the broker has confirmed them."""
    from infra.log import EventProducer

    producer = EventProducer(settings, "cli")
    await producer.start()
    try:
        for key, event in events:
            await producer.send_and_wait(topic, event, key=key)
    finally:
        await producer.stop()


async def write_tenant(settings: KafkaSettings, tenant: TenantChanged) -> None:
    """Replaces a tenant's state, but for what others wrote of it at the same time: nobody's key or revocation is undone unseen.

    Raises HeadraceError (conflict) if others don't stop.
    """
    for _ in range(MERGES_MAX):
        await write(settings, TENANTS, (tenant.tenant, tenant))
        states = await _written_at_once(settings, tenant.tenant)
        tenant = reduce(merged, states, states[-1])
        if tenant == merged(states[-1], states[-1]):
            return
    raise HeadraceError(Reason.CONFLICT, f"others keep changing the tenant {tenant.tenant}; try again")


async def _written_at_once(settings: KafkaSettings, name: str) -> list[TenantChanged]:
    """The states of a tenant that were written last, within `AT_ONCE_MS`, in order."""
    from infra.views import View

    found: list[tuple[int, TenantChanged]] = []

    def apply(event: Event, record: Any) -> None:
        if isinstance(event, TenantChanged) and event.tenant == name:
            found.append((record.timestamp, event))

    view = View(settings, TENANTS, apply)
    await view.start()
    await view.stop()
    return [state for at_ms, state in found if at_ms >= found[-1][0] - AT_ONCE_MS]


def merged(one: TenantChanged, other: TenantChanged) -> TenantChanged:
    """Both states of a tenant in one: keys are only ever added and revoked, and a tenant is only ever shut out."""
    keys = {key.key_id: key for key in one.keys}
    for key in other.keys:
        revoked = [k.revoked_ms for k in (key, keys.get(key.key_id, key)) if k.revoked_ms is not None]
        keys[key.key_id] = replace(key, revoked_ms=min(revoked, default=None))
    ordered = tuple(sorted(keys.values(), key=lambda key: (key.created_ms, key.key_id)))
    return replace(one, keys=ordered, disabled=one.disabled or other.disabled)


async def ensure_all(settings: KafkaSettings, replication: int = 1) -> list[dict[str, Any]]:
    """Makes the log's topics match: the core ones, and those of each registered model version."""
    from infra.topics import ensure_core, ensure_model

    reports = await ensure_core(settings, replication=replication)
    for version in (await read_models(settings)).versions.values():
        reports += await ensure_model(settings, version, replication)
    return [
        {
            "topic": r.name,
            "partitions": r.partitions,
            "done": "; ".join((r.action, *r.changes, *r.left)),
            "action": r.action,
            "changes": list(r.changes),
            "left": list(r.left),
        }
        for r in reports
    ]


# --- keys: pure but for randomness ------------------------------------------------------------------------------------


def new_tenant(name: str, created_ms: int) -> TenantChanged:
    """A tenant with no key and a salt of its own."""
    return TenantChanged(check_word("tenant", name), secrets.token_hex(SALT_BYTES), (), created_ms)


def new_key(tiers: tuple[str, ...], created_ms: int, name: str = "") -> tuple[str, ApiKey]:
    """An API key, which is shown once, and what is kept of it."""
    key_id = secrets.token_hex(KEY_ID_BYTES)
    key = f"hr-{key_id}-{secrets.token_hex(KEY_RANDOM_BYTES)}"
    return key, ApiKey(key_id, hash_of(key), tiers, created_ms, None, name)


def hash_of(key: str) -> str:
    """The SHA-256 of an API key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def add_key(tenant: TenantChanged, key: ApiKey) -> TenantChanged:
    """The tenant with one more key. Raises HeadraceError (conflict) at the limit."""
    if len(tenant.keys) >= KEYS_MAX:
        raise HeadraceError(Reason.CONFLICT, f"{tenant.tenant} has {KEYS_MAX} keys, the most a tenant may have")
    return replace(tenant, keys=(*tenant.keys, key))


def revoke_key(tenant: TenantChanged, key_id: str, at_ms: int) -> TenantChanged:
    """The tenant with one key revoked. Raises HeadraceError (not_found, or conflict if it was revoked before)."""
    key = find_key(tenant, key_id)
    if key.revoked_ms is not None:
        raise HeadraceError(Reason.CONFLICT, f"key {key_id} is revoked already")
    return replace(tenant, keys=tuple(replace(k, revoked_ms=at_ms) if k.key_id == key_id else k for k in tenant.keys))


def find_key(tenant: TenantChanged, key_id: str | None) -> ApiKey:
    """The key of that id, or the first that is not revoked. Raises HeadraceError (not_found)."""
    for key in tenant.keys:
        if key.key_id == key_id or (key_id is None and key.revoked_ms is None):
            return key
    known = ", ".join(key.key_id for key in tenant.keys) or "none"
    wanted = f"no key {key_id!r}" if key_id else "no key that is not revoked"
    raise HeadraceError(
        Reason.NOT_FOUND,
        f"{tenant.tenant} has {wanted}; its keys: {known} (`headrace tenants keys add {tenant.tenant}`)",
    )
