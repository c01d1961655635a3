"""`headrace tenants usage`: what a tenant has reserved and spent, read from the log by the same fold as admission decides by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from cli.context import console, kafka_settings, print_json, run_async, table
from cli.quotas import JSON, in_force_of
from cli.registry import find_tenant, now_ms, read_states
from decisions.accounts import Accounts
from decisions.ledger import ALL_KEYS_AND_MODELS, NEW, Counter, Counters, Unit
from decisions.quota import EACH, Gauge, duration, gauges, limits_for
from schemas.errors import Undecodable
from schemas.events import LedgerSaved, Quota, TenantChanged
from schemas.topics import LIFECYCLE, TIERS, ledger_topic, requests_topic

if TYPE_CHECKING:
    from infra.settings import KafkaSettings


@dataclass(frozen=True, slots=True)
class Usage:
    """One scope of a tenant's ledger on one tier. `source` says whose its limits are: `own`, `default`, or "" if none holds."""

    tier: str
    scope: str
    source: str
    counter: Counter
    gauges: tuple[Gauge, ...]


@click.command("usage")
@click.argument("name")
@click.option("--tier", type=click.Choice(TIERS), help="One tier alone.")
@JSON
def usage(name: str, tier: str | None, as_json: bool) -> None:
    """What NAME has used of its limits, and in all."""
    tiers = TIERS if tier is None else (tier,)
    at_ms, found = run_async(_usage(kafka_settings(), name, tiers))
    if as_json:
        for one in found:
            print_json(_object(name, one, at_ms))
    else:
        _show(name, found, at_ms)


async def _usage(settings: KafkaSettings, name: str, tiers: Sequence[str]) -> tuple[int, list[Usage]]:
    states = await read_states(settings)
    tenant = find_tenant(states, name)
    counters = await read_counters(settings, name, tiers)
    at_ms = now_ms()
    return at_ms, [
        one
        for tier, counted in counters.items()
        for one in usages(tier, tenant, in_force_of(states, name, tier), counted, at_ms)
    ]


# --- from the log ----------------------------------------------------------------------------------------------------


async def read_counters(settings: KafkaSettings, tenant: str, tiers: Sequence[str]) -> dict[str, Counters]:
    """A tenant's counters by tier and scope, as the log tells them now. Raises HeadraceError (unavailable)."""
    partition = await _partition_of(settings, tenant)
    restored = await asyncio.gather(*(_restored(settings, tier, partition, tenant) for tier in tiers))
    accounts = dict(zip(tiers, restored, strict=True))
    await _follow(settings, partition, tenant, accounts)
    return {tier: known.counters(tenant) for tier, known in accounts.items()}


async def _partition_of(settings: KafkaSettings, tenant: str) -> int:
    """Where a tenant's requests are decided: what it may use is told in the same partition of `lifecycle` and `ledger.*`."""
    from aiokafka.partitioner import DefaultPartitioner

    from infra.kafka import make_consumer
    from infra.read import assign_all

    consumer = make_consumer(settings)
    await consumer.start()
    try:
        numbers = sorted(place.partition for place in await assign_all(consumer, requests_topic(TIERS[0])))
    finally:
        await consumer.stop()
    return int(DefaultPartitioner()(tenant.encode(), numbers, numbers))


async def _restored(settings: KafkaSettings, tier: str, partition: int, tenant: str) -> Accounts:
    """The rows of a tenant, and the marks, which say from where on `lifecycle` tells more."""
    from infra.log import EventDecoder
    from infra.read import read_to_end

    accounts, decoder = Accounts(tier), EventDecoder(settings)
    async for record in read_to_end(settings, ledger_topic(tier), only=(partition,)):
        if record.value is None:
            continue
        try:
            row = await decoder.decode(record.value)
        except Undecodable:
            continue
        if isinstance(row, LedgerSaved) and row.tenant in ("", tenant):
            accounts.restore(row)
    return accounts


async def _follow(settings: KafkaSettings, partition: int, tenant: str, accounts: Mapping[str, Accounts]) -> None:
    """Applies what `lifecycle` tells of a tenant; its records have the tenant as their key."""
    from aiokafka import TopicPartition

    from infra.log import EventDecoder
    from infra.read import read_to_end

    decoder, key = EventDecoder(settings), tenant.encode()
    positions = {TopicPartition(LIFECYCLE, partition): min(known.start for known in accounts.values())}
    async for record in read_to_end(settings, LIFECYCLE, positions, only=(partition,)):
        if record.key != key or record.value is None:
            continue
        try:
            event = await decoder.decode(record.value)
        except Undecodable:
            continue
        for known in accounts.values():
            if record.offset >= known.start:
                known.apply(record.offset, record.timestamp, event)


# --- what it comes to ------------------------------------------------------------------------------------------------


def usages(
    tier: str, tenant: TenantChanged, quotas: Iterable[tuple[str, Quota]], counters: Counters, at_ms: int
) -> Iterator[Usage]:
    """Every scope that is limited or counted, the tenant's whole first. What counts each model alone begins when it is used."""
    held = {quota: source for source, quota in quotas}
    limits = _limits(tenant, tuple(held), counters)
    for scope in sorted(limits.keys() | counters.keys()):
        quota = limits.get(scope)
        if quota is None or quota not in held:
            if scope not in counters:
                continue
            quota = None
        elif scope not in counters and quota.model == EACH:
            continue
        measured = () if quota is None else tuple(gauges(counters, {scope: quota}, at_ms))
        source = "" if quota is None else held[quota]
        yield Usage(tier, scope, source, counters.get(scope, NEW), measured)


def _limits(tenant: TenantChanged, quotas: tuple[Quota, ...], counters: Counters) -> dict[str, Quota]:
    """By scope, the quotas that hold for some key and model."""
    counted = [names_of(scope) for scope in counters]
    keys = {"", *(key.key_id for key in tenant.keys if key.revoked_ms is None), *(key for key, _ in counted)}
    keys |= {quota.key_id for quota in quotas}
    models = {"", *(model for _, model in counted), *(quota.model for quota in quotas)}
    found: dict[str, Quota] = {}
    for key_id in keys - {EACH}:
        for model in models - {EACH}:
            found |= limits_for([quota for quota in quotas if _applies(quota, key_id, model)], key_id, model)
    return found


def _applies(quota: Quota, key_id: str, model: str) -> bool:
    """Whether a quota counts something that has these names; "" is nobody's name."""
    return not ((quota.key_id and not key_id) or (quota.model and not model))


def names_of(scope: str) -> tuple[str, str]:
    """The key and the model in a scope's name."""
    words = scope.split(" ")
    named = dict(zip(words[::2], words[1::2], strict=False))
    return named.get("key", ""), named.get("model", "")


# --- showing ---------------------------------------------------------------------------------------------------------


def _reserved(gauge: Gauge) -> int:
    """Of what is in use, that which requests hold until they end. A request counts as spent when it is let in."""
    unit = gauge.kind.unit
    return 0 if unit is Unit.REQUESTS else gauge.used if unit is Unit.RUNNING else gauge.counter.held


def _reset_ms(gauge: Gauge, at_ms: int) -> int | None:
    """How long until all of a limit is free if no other request comes; None if only an ending can tell."""
    window = gauge.kind.window
    free_ms = 0 if window is None else gauge.counter.falls_to(0, window, gauge.kind.unit, at_ms) - at_ms
    return None if gauge.used and not free_ms else free_ms


def _object(name: str, one: Usage, at_ms: int) -> dict[str, Any]:
    key_id, model = names_of(one.scope)
    return {
        "tenant": name,
        "tier": one.tier,
        "scope": one.scope,
        "key_id": key_id,
        "model": model,
        "quota": one.source or None,
        "requests": one.counter.requests_total,
        "tokens": one.counter.tokens_total,
        "running": one.counter.running,
        "reserved_tokens": one.counter.held,
        "at_ms": at_ms,
        "limits": [
            {
                "kind": gauge.kind.field,
                "limit": gauge.limit,
                "reserved": _reserved(gauge),
                "spent": gauge.used - _reserved(gauge),
                "remaining": gauge.remaining,
                "reset_ms": _reset_ms(gauge, at_ms),
            }
            for gauge in one.gauges
        ],
    }


def _show(name: str, found: list[Usage], at_ms: int) -> None:
    shown = table("tier", "counted", "limit", ">at most", ">reserved", ">spent", ">remaining", "all free in")
    totals = table("tier", "counted", ">requests", ">tokens", ">running", ">reserved tokens", title="In all")
    for one in found:
        where = one.tier, one.scope or "all keys and models"
        for gauge in one.gauges:
            numbers = gauge.limit, _reserved(gauge), gauge.used - _reserved(gauge), gauge.remaining
            shown.add_row(*where, gauge.kind.text, *(f"{number:,}" for number in numbers), _reset(gauge, at_ms))
        counter = one.counter
        counts = counter.requests_total, counter.tokens_total, counter.running, counter.held
        totals.add_row(*where, *(f"{count:,}" for count in counts))
    if shown.rows:
        console().print(shown)
    else:
        console().print(f"No limit holds for {name}: `headrace tenants set-quota {name}` sets one.", markup=False)
    if any(one.scope == ALL_KEYS_AND_MODELS and one.counter != NEW for one in found):
        console().print(totals)
    else:
        console().print(f"{name} has asked for nothing yet.", markup=False)


def _reset(gauge: Gauge, at_ms: int) -> str:
    wait_ms = _reset_ms(gauge, at_ms)
    if wait_ms is None:
        return "when they end"
    return duration(wait_ms - wait_ms % 1_000 if wait_ms > 1_000 else wait_ms) if wait_ms else ""
