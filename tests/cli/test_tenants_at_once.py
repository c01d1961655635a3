"""Two commands that change one tenant at the same time: each does what it said."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

import pytest

from cli.registry import (
    Written,
    add_key,
    counted_by,
    joined,
    merged,
    new_key,
    new_tenant,
    read_tenant,
    revoke_key,
    write_tenant,
)
from infra.settings import KafkaSettings
from schemas.events import Quota

NOW = 1_800_000_000_000


def test_keys_are_joined_and_revocations_stay() -> None:
    (_, first), (_, second), (_, third) = (new_key(("batch",), NOW + i) for i in range(3))
    before = add_key(new_tenant("acme", NOW), first)
    one = add_key(revoke_key(before, first.key_id, NOW + 9), second)
    other = add_key(before, third)
    for both in (merged(one, other), merged(other, one)):
        assert [key.key_id for key in both.keys] == [first.key_id, second.key_id, third.key_id]
        assert [key.revoked_ms for key in both.keys] == [NOW + 9, None, None]
        assert merged(both, one) == merged(both, other) == both


@pytest.mark.kafka
async def test_many_at_once_lose_nobodys_change(kafka: KafkaSettings) -> None:
    name = f"at-once-{secrets.token_hex(4)}"
    _, first = new_key(("batch",), NOW)
    await write_tenant(kafka, add_key(new_tenant(name, NOW), first))

    async def add() -> str:
        _, kept = new_key(("batch",), NOW + 1)
        await write_tenant(kafka, add_key(await read_tenant(kafka, name), kept))
        return kept.key_id

    async def revoke() -> None:
        await write_tenant(kafka, revoke_key(await read_tenant(kafka, name), first.key_id, NOW + 2))

    *added, _ = await asyncio.gather(*[add() for _ in range(5)], revoke())
    found = await read_tenant(kafka, name)
    assert {key.key_id for key in found.keys} == {first.key_id, *added}
    assert [key.key_id for key in found.keys if key.revoked_ms is not None] == [first.key_id]


def test_a_record_sets_and_removes_the_quotas_that_its_writer_meant_and_no_others() -> None:
    whole, key, batch = (
        Quota("interactive", requests_per_minute=1),
        Quota("interactive", "k", requests_per_minute=2),
        Quota("batch", requests_per_minute=3),
    )
    tenant = new_tenant("acme", NOW)

    def said(*quotas: Quota, meant: tuple[Quota, ...] | None = ()) -> Written:
        return Written(
            replace(tenant, quotas=quotas), None if meant is None else frozenset(counted_by(q) for q in meant)
        )

    assert joined([said(), said(whole, meant=(whole,)), said(meant=())]).quotas == (whole,)
    assert joined([said(), said(whole, meant=(whole,)), said(batch, meant=(batch,))]).quotas == (whole, batch)
    assert joined([said(whole, key), said(whole, meant=(key,)), said(whole, key, batch, meant=(batch,))]).quotas == (
        whole,
        batch,
    )
    more = replace(whole, requests_per_minute=9)
    assert joined([said(whole), said(more, meant=(whole,)), said(whole, batch, meant=(batch,))]).quotas == (more, batch)
    assert joined([said(whole), said(batch, meant=None)]).quotas == (batch,)  # a writer that doesn't say means all


@pytest.mark.kafka
async def test_quotas_that_are_set_at_once_with_keys_and_revocations_all_hold(kafka: KafkaSettings) -> None:
    name = f"at-once-{secrets.token_hex(4)}"
    _, first = new_key(("batch",), NOW)
    gone = Quota("batch", "gone", requests_per_minute=1)
    await write_tenant(kafka, replace(add_key(new_tenant(name, NOW), first), quotas=(gone,)))

    async def change(*quotas: Quota, remove: tuple[Quota, ...] = ()) -> None:
        before = await read_tenant(kafka, name)
        kept = [quota for quota in before.quotas if quota not in remove]
        await write_tenant(kafka, replace(before, quotas=(*kept, *quotas)), [counted_by(q) for q in (*quotas, *remove)])

    async def add() -> str:
        _, kept = new_key(("batch",), NOW + 1)
        await write_tenant(kafka, add_key(await read_tenant(kafka, name), kept))
        return kept.key_id

    async def revoke() -> None:
        await write_tenant(kafka, revoke_key(await read_tenant(kafka, name), first.key_id, NOW + 2))

    each = [Quota("interactive", f"k{i}", tokens_per_day=i + 1) for i in range(4)]
    added, *_ = await asyncio.gather(add(), revoke(), *(change(quota) for quota in each), change(remove=(gone,)))
    found = await read_tenant(kafka, name)
    assert found.quotas == tuple(each)
    assert {key.key_id for key in found.keys} == {first.key_id, added}
    assert [key.key_id for key in found.keys if key.revoked_ms is not None] == [first.key_id]
