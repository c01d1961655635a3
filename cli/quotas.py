"""`headrace tenants set-quota` and `quotas`: what a tenant may use, as a whole, by key and by model, and what holds by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from cli.context import console, kafka_settings, print_json, run_async, table
from cli.registry import (
    counted_by,
    find_key,
    find_tenant,
    now_ms,
    ordered,
    read_models,
    read_states,
    write_tenant,
)
from decisions.capacity import PERCENT_MAX, can_guarantee, reserved_percent
from decisions.quota import EACH, KINDS, LIMIT_MAX, check_quotas, in_force, only_reserves
from schemas.errors import HeadraceError
from schemas.events import Quota, TenantChanged
from schemas.reasons import Reason
from schemas.topics import DEFAULTS, TIERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from infra.settings import KafkaSettings

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")
DEFAULT = click.option(
    "--default", "default", is_flag=True, help="In place of NAME: what holds for tenants without quotas of their own."
)


@dataclass(frozen=True, slots=True)
class Told:
    """The tenant as it is now, and what its operator should know of the change."""

    tenant: TenantChanged
    warnings: tuple[str, ...] = ()


def _limits(command: Callable[..., None]) -> Callable[..., None]:
    """An option for each limit that there is."""
    for kind in reversed(KINDS):
        flag, most = f"--{kind.field.replace('_', '-')}", click.IntRange(1, LIMIT_MAX)
        command = click.option(flag, kind.field, type=most, metavar="N", help=f"At most N {kind.text}.")(command)
    return command


def named(name: str | None, default: bool) -> str:
    """The tenant that a command is about. Raises click.UsageError unless it is named in one way."""
    if default == (name is not None):
        raise click.UsageError("Name a tenant or say --default, and not both.")
    return name or DEFAULTS


@click.command("set-quota")
@click.argument("name", required=False)
@DEFAULT
@click.option("--tier", type=click.Choice(TIERS), required=True)
@click.option("--key", "key_id", default="", metavar="ID", help="Count one key alone; '*': each key alone.")
@click.option("--model", default="", help="Count one model alone; '*': each model alone.")
@_limits
@click.option(
    "--reserved-percent",
    type=click.IntRange(1, PERCENT_MAX),
    metavar="N",
    help="Keep N percent of the slots of --model for the tenant: no limit, but what it can count on.",
)
@click.option("--unlimited", is_flag=True, help="No limit at all: the default quotas don't hold either.")
@click.option("--remove", is_flag=True, help="Take the quota away.")
@JSON
def set_quota(
    name: str | None,
    default: bool,
    tier: str,
    key_id: str,
    model: str,
    reserved_percent: int | None,
    unlimited: bool,
    remove: bool,
    as_json: bool,
    **limits: int | None,
) -> None:
    """Set what NAME may use on a tier. It replaces the quota for the same tier, key and model, and no other.

    A tenant with a quota of its own on a tier has no default ones there. Tokens are prompt and answer together; what a request may
    generate at most is reserved until it ends.
    """
    tenant = named(name, default)
    limited = any(limit is not None for limit in (*limits.values(), reserved_percent))
    if limited + unlimited + remove != 1:
        raise click.UsageError("Give at least one limit, or --reserved-percent, or --unlimited, or --remove.")
    if default and reserved_percent is not None:
        raise click.UsageError("Slots are reserved for one tenant: name it.")
    quota = Quota(tier, key_id, model, **limits, reserved_percent=reserved_percent)
    told = run_async(_set(kafka_settings(), tenant, quota, remove))
    for warning in told.warnings:
        console(stderr=True).print(warning, markup=False)
    if as_json:
        print_json({"tenant": told.tenant.tenant, "quotas": [quotas_object(own) for own in told.tenant.quotas]})
    else:
        console().print(_done(tenant, quota, remove), markup=False)


async def _set(settings: KafkaSettings, name: str, quota: Quota, remove: bool) -> Told:
    states = await read_states(settings)
    if name == DEFAULTS:
        before = states.get(name, TenantChanged(DEFAULTS, "", (), now_ms()))
    else:
        before = find_tenant(states, name)
    others = [own for own in before.quotas if counted_by(own) != counted_by(quota)]
    warnings: list[str] = []
    if remove:
        if len(others) == len(before.quotas):
            raise HeadraceError(Reason.NOT_FOUND, f"{_who(name)} no such quota: {scope_text(quota)} on {quota.tier}")
    else:
        others.append(quota)
        check_quotas([quota])
        check_quotas(others)
        _check_key(before, quota.key_id)
        _check_reserved(states, name, quota)
        if quota.model not in ("", EACH) and quota.model not in {
            model for model, _ in (await read_models(settings)).versions
        }:
            warnings.append(f"no model {quota.model!r} is registered: the quota counts once one is")
    after = replace(before, quotas=ordered(others))
    warnings += _about_defaults(before, after, quota.tier, states.get(DEFAULTS))
    await write_tenant(settings, after, [counted_by(quota)])
    return Told((await read_states(settings))[name], tuple(warnings))


def _check_key(tenant: TenantChanged, key_id: str) -> None:
    if key_id in ("", EACH):
        return
    if tenant.tenant == DEFAULTS:
        raise HeadraceError(
            Reason.INVALID_REQUEST,
            f"a default quota can name no key; {EACH} means each key of each tenant",
            param="key",
        )
    find_key(tenant, key_id)


def _check_reserved(states: dict[str, TenantChanged], name: str, quota: Quota) -> None:
    """No more is promised of a model than there is."""
    if quota.reserved_percent is None:
        return
    others = {
        other: percent
        for other, state in states.items()
        if other != name and (percent := reserved_percent(state.quotas, quota.tier, quota.model))
    }
    if not can_guarantee(PERCENT_MAX, {**others, name: quota.reserved_percent}):
        taken = ", ".join(f"{other} {percent} %" for other, percent in sorted(others.items()))
        raise HeadraceError(
            Reason.CONFLICT,
            f"{PERCENT_MAX - sum(others.values())} percent of {quota.model} on {quota.tier} are left to reserve ({taken})",
            param="reserved_percent",
        )


def _about_defaults(
    before: TenantChanged, after: TenantChanged, tier: str, defaults: TenantChanged | None
) -> list[str]:
    """Whether the default quotas of a tier begin or cease to hold for a tenant by a change."""
    name = before.tenant
    if name == DEFAULTS or defaults is None or not any(quota.tier == tier for quota in defaults.quotas):
        return []
    had, has = (
        any(quota.tier == tier and not only_reserves(quota) for quota in state.quotas) for state in (before, after)
    )
    if had == has:
        return []
    return [f"the default quotas of {tier} {'no longer hold' if has else 'hold again'} for {name}"]


def _done(name: str, quota: Quota, remove: bool) -> str:
    where = f"{scope_text(quota)} on {quota.tier}"
    whose = "By default" if name == DEFAULTS else name
    return f"{whose}: {where}: {'no quota any more' if remove else limits_text(quota)}."


def _who(name: str) -> str:
    return "there is by default" if name == DEFAULTS else f"{name} has"


# --- showing ---------------------------------------------------------------------------------------------------------


@click.command("quotas")
@click.argument("name", required=False)
@DEFAULT
@JSON
def quotas(name: str | None, default: bool, as_json: bool) -> None:
    """What NAME may use: its own quotas, and the default ones on tiers where it has none."""
    tenant = named(name, default)
    states = run_async(read_states(kafka_settings()))
    if tenant != DEFAULTS:
        find_tenant(states, tenant)
    rows = [(source, quota) for tier in TIERS for source, quota in in_force_of(states, tenant, tier)]
    if as_json:
        for source, quota in rows:
            print_json({"tenant": tenant, "source": source, **quotas_object(quota)})
        return
    shown = table("tier", "counted", "limits", "whose")
    for source, quota in rows:
        shown.add_row(quota.tier, scope_text(quota), limits_text(quota), source)
    nothing = f"No limit holds {'by default' if default else f'for {tenant}'}: `headrace tenants set-quota` sets one."
    console().print(shown if rows else nothing)


def in_force_of(states: dict[str, TenantChanged], name: str, tier: str) -> Sequence[tuple[str, Quota]]:
    """A tenant's quotas of a tier, each with whose it is: `own` or `default`."""
    own, default = (states[whose].quotas if whose in states else () for whose in (name, DEFAULTS))
    found = in_force(own, default, tier)
    source = "own" if name != DEFAULTS and any(quota in own for quota in found) else "default"
    return [(source, quota) for quota in found]


def quotas_object(quota: Quota) -> dict[str, Any]:
    """A quota in JSON: what it counts, and the limits that it has."""
    limits = {kind.field: limit for kind in KINDS if (limit := getattr(quota, kind.field)) is not None}
    reserved = {} if quota.reserved_percent is None else {"reserved_percent": quota.reserved_percent}
    return {"tier": quota.tier, "key_id": quota.key_id, "model": quota.model, **limits, **reserved}


def scope_text(quota: Quota) -> str:
    """What a quota counts, in words."""
    words = [
        f"each {what}" if name == EACH else f"{what} {name}"
        for what, name in (("key", quota.key_id), ("model", quota.model))
        if name
    ]
    return ", ".join(words) or "all keys and models"


def limits_text(quota: Quota) -> str:
    """A quota's limits, in words."""
    limits = [f"{limit:,} {kind.text}" for kind in KINDS if (limit := getattr(quota, kind.field)) is not None]
    if quota.reserved_percent is not None:
        limits.append(f"{quota.reserved_percent} % of the slots reserved")
    return ", ".join(limits) or "unlimited"
