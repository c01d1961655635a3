"""Two commands that change one tenant at the same time: each does what it said."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from cli.registry import add_key, merged, new_key, new_tenant, read_tenant, revoke_key, write_tenant
from infra.settings import KafkaSettings

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
