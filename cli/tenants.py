"""`headrace tenants`: who may call, with which keys, and grants for those who write to the log themselves."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cli.context import console, data_dir, kafka_settings, print_json, run_async, table
from cli.quotas import quotas, quotas_object, set_quota
from cli.registry import (
    DEFAULT_TIERS,
    add_key,
    find_key,
    new_key,
    new_tenant,
    now_ms,
    read_tenant,
    read_tenants,
    revoke_key,
    write_tenant,
)
from cli.usage import usage
from schemas.errors import HeadraceError
from schemas.events import ApiKey, Reply, TenantChanged
from schemas.reasons import Reason
from schemas.topics import DAY_MS, HOUR_MS, MINUTE_MS, TIERS, tenant_tokens_topic

if TYPE_CHECKING:
    from infra.settings import KafkaSettings

GRANT_MAX_MS = 30 * DAY_MS
_UNITS_MS = {"s": 1_000, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _tiers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    tiers = tuple(part.strip() for part in value.split(",") if part.strip())
    if not tiers or (unknown := [tier for tier in tiers if tier not in TIERS]):
        raise click.BadParameter(
            f"{', '.join(unknown) if tiers else 'nothing'} is no tier; there are: {', '.join(TIERS)}"
        )
    return tiers


def _duration(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """`90s`, `15m`, `1h` or `7d` in milliseconds."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", value)
    duration_ms = int(match[1]) * _UNITS_MS[match[2]] if match else 0
    if not 0 < duration_ms <= GRANT_MAX_MS:
        raise click.BadParameter(f"{value!r} is no duration such as 90s, 15m, 1h or 7d, of at most 30d")
    return duration_ms


TIERS_OPTION = click.option(
    "--tiers", callback=_tiers, metavar="TIER,…", help=f"Among {', '.join(TIERS)} (default {','.join(DEFAULT_TIERS)})."
)


@click.group()
def tenants() -> None:
    """Tenants, their API keys, their quotas and their grants."""


for _command in (set_quota, quotas, usage):
    tenants.add_command(_command)


@tenants.command()
@click.argument("name")
@TIERS_OPTION
@JSON
def create(name: str, tiers: tuple[str, ...] | None, as_json: bool) -> None:
    """Create the tenant NAME with its first key, which is shown this once."""
    key, kept = run_async(_create(kafka_settings(), name, tiers or DEFAULT_TIERS))
    _show_key(name, key, kept, as_json)


async def _create(settings: KafkaSettings, name: str, tiers: tuple[str, ...]) -> tuple[str, ApiKey]:
    tenant = new_tenant(name, now_ms())
    if name in await read_tenants(settings):
        raise HeadraceError(
            Reason.CONFLICT,
            f"there is a tenant {name!r} already; `headrace tenants keys add {name}` gives it another key",
        )
    key, kept = new_key(tiers, now_ms())
    await write_tenant(settings, add_key(tenant, kept))
    return key, kept


def _show_key(tenant: str, key: str, kept: ApiKey, as_json: bool) -> None:
    if as_json:
        print_json({"tenant": tenant, "key_id": kept.key_id, "key": key, "tiers": list(kept.tiers)})
        return
    click.echo(key)
    console(stderr=True).print(
        f"This is the key of {tenant} (id {kept.key_id}, tiers {', '.join(kept.tiers)}). Only its hash is kept: it isn't shown again."
    )


@tenants.command("list")
@JSON
def list_(as_json: bool) -> None:
    """Every tenant, with its keys and its own quotas."""
    found = run_async(read_tenants(kafka_settings()))
    if as_json:
        for tenant in found.values():
            print_json(_public(tenant))
        return
    shown = table("tenant", "state", ">keys", ">quotas", "created")
    for name, tenant in sorted(found.items()):
        live = sum(key.revoked_ms is None for key in tenant.keys)
        state, own = "revoked" if tenant.disabled else "active", str(len(tenant.quotas) or "")
        shown.add_row(name, state, str(live), own, _date(tenant.created_ms))
    console().print(shown if found else "There is no tenant yet: `headrace tenants create NAME` makes one.")


def _public(tenant: TenantChanged) -> dict[str, Any]:
    """A tenant without its salt and its keys' hashes."""
    keys = [{name: value for name, value in dataclasses.asdict(key).items() if name != "sha256"} for key in tenant.keys]
    own = [quotas_object(quota) for quota in tenant.quotas]
    return {
        "tenant": tenant.tenant,
        "disabled": tenant.disabled,
        "created_ms": tenant.created_ms,
        "keys": keys,
        "quotas": own,
    }


def _date(at_ms: int | None) -> str:
    return "" if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


@tenants.group()
def keys() -> None:
    """A tenant's API keys."""


@keys.command("add")
@click.argument("name")
@TIERS_OPTION
@click.option("--name", "label", default="", help="What the key is for.")
@JSON
def add(name: str, tiers: tuple[str, ...] | None, label: str, as_json: bool) -> None:
    """Give the tenant NAME one more key, which is shown this once."""

    async def work(settings: KafkaSettings) -> tuple[str, ApiKey]:
        key, kept = new_key(tiers or DEFAULT_TIERS, now_ms(), label)
        await write_tenant(settings, add_key(await read_tenant(settings, name), kept))
        return key, kept

    _show_key(name, *run_async(work(kafka_settings())), as_json=as_json)


@keys.command("list")
@click.argument("name")
@JSON
def list_keys(name: str, as_json: bool) -> None:
    """The keys of the tenant NAME; what is kept of them can't be turned back."""
    tenant = run_async(read_tenant(kafka_settings(), name))
    if as_json:
        for key in _public(tenant)["keys"]:
            print_json(key)
        return
    shown = table("id", "name", "tiers", "created", "revoked")
    for own in tenant.keys:
        shown.add_row(own.key_id, own.name, ", ".join(own.tiers), _date(own.created_ms), _date(own.revoked_ms))
    console().print(shown)


@keys.command("revoke")
@click.argument("name")
@click.argument("key_id")
@JSON
def revoke_one(name: str, key_id: str, as_json: bool) -> None:
    """Revoke one key of the tenant NAME, and the grants given for it."""

    async def work(settings: KafkaSettings) -> TenantChanged:
        tenant = revoke_key(await read_tenant(settings, name), key_id, now_ms())
        await write_tenant(settings, tenant)
        return tenant

    tenant = run_async(work(kafka_settings()))
    if as_json:
        print_json(_public(tenant))
    else:
        console().print(f"Key {key_id} of {name} is revoked.")


@tenants.command()
@click.argument("name")
@JSON
def revoke(name: str, as_json: bool) -> None:
    """Shut the tenant NAME out: all its keys and grants stop working."""

    async def work(settings: KafkaSettings) -> TenantChanged:
        before = await read_tenant(settings, name)
        at_ms = now_ms()
        own = tuple(dataclasses.replace(key, revoked_ms=key.revoked_ms or at_ms) for key in before.keys)
        tenant = dataclasses.replace(before, keys=own, disabled=True)
        await write_tenant(settings, tenant)
        return tenant

    tenant = run_async(work(kafka_settings()))
    if as_json:
        print_json(_public(tenant))
    else:
        console().print(f"{name} is shut out: its keys and grants no longer work.")


@tenants.command()
@click.argument("name")
@click.option(
    "--key-id", help="The key it stands for (default: the first that isn't revoked); revoking that key ends the grant."
)
@TIERS_OPTION
@click.option(
    "--expires",
    "ttl_ms",
    default="1h",
    show_default=True,
    callback=_duration,
    metavar="1h",
    help="How long it holds: 90s, 15m, 1h, 7d.",
)
@click.option(
    "--encoding",
    type=click.Choice(["json", "avro"]),
    default="json",
    show_default=True,
    help="Of the answer's records.",
)
@JSON
def grant(
    name: str, key_id: str | None, tiers: tuple[str, ...] | None, ttl_ms: int, encoding: str, as_json: bool
) -> None:
    """Sign a grant with which NAME may write requests to the log, and read the answers from its own topic."""
    from infra.settings import grant_secret

    secret = grant_secret(data_dir())
    out = run_async(grant_for(kafka_settings(), secret, name, key_id, tiers, ttl_ms, encoding))
    if as_json:
        print_json(out)
        return
    click.echo(out["grant"])
    text = f"Send it in the record header `grant` to requests.{{{','.join(out['tiers'])}}}; answers come on {out['topic']}, partition {out['partition']}"
    console(stderr=True).print(f"{text}. It expires at {_date(out['expires_ms'])} UTC. docs/direct.py is an example.")


async def grant_for(
    settings: KafkaSettings,
    secret: bytes,
    name: str,
    key_id: str | None,
    tiers: tuple[str, ...] | None,
    ttl_ms: int,
    encoding: str,
) -> dict[str, Any]:
    """Checks the key, makes the reply topic, and signs: `grant`, and what it says. Raises HeadraceError (not_found, permission_denied)."""
    from infra.grants import Grant, mint
    from infra.topics import ensure_tenant

    tenant = await read_tenant(settings, name)
    if tenant.disabled:
        raise HeadraceError(Reason.PERMISSION_DENIED, f"{name} is shut out")
    key = find_key(tenant, key_id)
    if key.revoked_ms is not None:
        raise HeadraceError(Reason.PERMISSION_DENIED, f"key {key.key_id} is revoked")
    if excess := [tier for tier in tiers or () if tier not in key.tiers]:
        raise HeadraceError(
            Reason.PERMISSION_DENIED,
            f"key {key.key_id} doesn't hold for {', '.join(excess)}, only for {', '.join(key.tiers)}",
        )
    await ensure_tenant(settings, name)
    reply = Reply(tenant_tokens_topic(name), 0, encoding)
    given = Grant(tenant=name, key_id=key.key_id, tiers=tiers or key.tiers, reply=reply, expires_ms=now_ms() + ttl_ms)
    return {
        "grant": mint(secret, given),
        "topic": reply.topic,
        "partition": reply.partition,
        "encoding": encoding,
        "tenant": name,
        "key_id": key.key_id,
        "tiers": list(given.tiers),
        "expires_ms": given.expires_ms,
    }
