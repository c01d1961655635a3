"""What the compacted topics say now: tenants and model versions, read to the end, changed, and written back whole."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from schemas.errors import HeadraceError
from schemas.events import ApiKey, Event, ModelPromoted, ModelVersionRegistered, Quota, TenantChanged
from schemas.reasons import Reason
from schemas.topics import BATCH, DEFAULTS, INTERACTIVE, REGISTRY, TENANTS, TIERS, check_word

if TYPE_CHECKING:
    from infra.log import Headers
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
QUOTAS_HEADER = "quotas"
"""On a record of `tenants`: what the quotas that its writer meant to change count, as a JSON list. Of all others it says nothing."""
Counted = tuple[str, str, str]
"""What a quota counts: tier, key and model. A tenant has one quota for each."""
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
    states = await read_states(settings)
    return {name: tenant for name, tenant in states.items() if name != DEFAULTS}


async def read_states(settings: KafkaSettings) -> dict[str, TenantChanged]:
    """Every tenant's present state, and under the name `*` what holds by default."""
    from infra.directory import TenantDirectory

    directory = TenantDirectory(settings)
    await directory.start()
    await directory.stop()
    return {tenant.tenant: tenant for tenant in directory.all()}


async def read_tenant(settings: KafkaSettings, name: str) -> TenantChanged:
    """One tenant's present state. Raises HeadraceError (not_found)."""
    return find_tenant(await read_tenants(settings), name)


async def write(settings: KafkaSettings, topic: str, *events: tuple[str, Event], headers: Headers = ()) -> None:
    """Writes (key, event) pairs in this order and returns once the broker has confirmed them."""
    from infra.log import EventProducer

    producer = EventProducer(settings, "cli")
    await producer.start()
    try:
        for key, event in events:
            await producer.send_and_wait(topic, event, key=key, headers=headers)
    finally:
        await producer.stop()


@dataclass(frozen=True, slots=True)
class Written:
    """A tenant's state as it was written, and the quotas that its writer meant to change; None: all of them."""

    state: TenantChanged
    meant: frozenset[Counted] | None = None


async def write_tenant(settings: KafkaSettings, tenant: TenantChanged, changed: Collection[Counted] = ()) -> None:
    """Replaces a tenant's state, but for what others wrote of it at the same time: nobody's key, revocation or quota is undone unseen.

    `changed` are the quotas that the caller has set or removed. Raises HeadraceError (conflict) if others don't stop.
    """
    for _ in range(MERGES_MAX):
        headers = [(QUOTAS_HEADER, json.dumps(sorted(changed)).encode())]
        await write(settings, TENANTS, (tenant.tenant, tenant), headers=headers)
        written = await _written_at_once(settings, tenant.tenant)
        last = merged(written[-1].state, written[-1].state)
        tenant = joined(written)
        if tenant == last:
            return
        changed = {counted_by(quota) for quota in set(tenant.quotas) ^ set(last.quotas)}
    raise HeadraceError(Reason.CONFLICT, f"others keep changing the tenant {tenant.tenant}; try again")


async def _written_at_once(settings: KafkaSettings, name: str) -> list[Written]:
    """The states of a tenant that were written last, within `AT_ONCE_MS`, in order."""
    from infra.views import View

    found: list[tuple[int, Written]] = []

    def apply(event: Event, record: Any) -> None:
        if isinstance(event, TenantChanged) and event.tenant == name:
            found.append((record.timestamp, Written(event, _meant(dict(record.headers).get(QUOTAS_HEADER)))))

    view = View(settings, TENANTS, apply)
    await view.start()
    await view.stop()
    return [written for at_ms, written in found if at_ms >= found[-1][0] - AT_ONCE_MS]


def _meant(header: bytes | None) -> frozenset[Counted] | None:
    return None if header is None else frozenset((tier, key, model) for tier, key, model in json.loads(header))


def joined(written: Sequence[Written]) -> TenantChanged:
    """What the states of a tenant that were written at once come to, whoever of their writers saw which."""
    last = written[-1].state
    return replace(reduce(merged, [one.state for one in written], last), quotas=_quotas(written))


def _quotas(written: Sequence[Written]) -> tuple[Quota, ...]:
    """Each record sets and removes the quotas that its writer meant, in the order of the log."""
    held = {counted_by(quota): quota for quota in written[0].state.quotas}
    for one in written[1:]:
        said = {counted_by(quota): quota for quota in one.state.quotas}
        for counted in one.meant if one.meant is not None else held.keys() | said.keys():
            held.pop(counted, None)
            if counted in said:
                held[counted] = said[counted]
    return ordered(held.values())


def merged(one: TenantChanged, other: TenantChanged) -> TenantChanged:
    """Both states of a tenant in one, with the quotas of the first: keys are only ever added and revoked, and a tenant is only ever shut out."""
    keys = {key.key_id: key for key in one.keys}
    for key in other.keys:
        revoked = [k.revoked_ms for k in (key, keys.get(key.key_id, key)) if k.revoked_ms is not None]
        keys[key.key_id] = replace(key, revoked_ms=min(revoked, default=None))
    by_age = tuple(sorted(keys.values(), key=lambda key: (key.created_ms, key.key_id)))
    return replace(one, keys=by_age, disabled=one.disabled or other.disabled, quotas=ordered(one.quotas))


async def ensure_all(
    settings: KafkaSettings, replication: int = 1, partitions: Mapping[str, int] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Makes the log's topics match: the core ones, and those of each registered model version. `partitions` names fields of `PartitionCounts`."""
    from infra.topics import ensure_core, ensure_models

    reports = await ensure_core(settings, partitions, replication)
    reports += await ensure_models(settings, (await read_models(settings)).versions.values(), replication)
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


# --- tenants, keys and quotas: pure but for randomness ----------------------------------------------------------------


def find_tenant(tenants: dict[str, TenantChanged], name: str) -> TenantChanged:
    """The tenant of that name; `*` is none. Raises HeadraceError (not_found)."""
    if name not in tenants or name == DEFAULTS:
        known = ", ".join(sorted(tenants.keys() - {DEFAULTS})) or "none yet"
        raise HeadraceError(
            Reason.NOT_FOUND, f"there is no tenant {name!r}; there are: {known} (`headrace tenants create`)"
        )
    return tenants[name]


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


def counted_by(quota: Quota) -> Counted:
    """What a quota counts."""
    return quota.tier, quota.key_id, quota.model


def ordered(quotas: Collection[Quota]) -> tuple[Quota, ...]:
    """Quotas in the order in which they are kept and shown."""
    return tuple(sorted(quotas, key=lambda quota: (_rank(quota.tier), *counted_by(quota))))


def _rank(tier: str) -> int:
    return TIERS.index(tier) if tier in TIERS else len(TIERS)
