"""What every store of the response cache does: one class of tests, run on memory and on Redis. Who runs it gives a fixture `store`."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

import pytest

from infra.answer_cache import ENTRY_OVERHEAD_BYTES, AnswerCache, Stored

TTL_MS = 60_000
SIZE = 1_000
VALUE = SIZE - ENTRY_OVERHEAD_BYTES


@dataclass
class Store:
    """A store, and names that nobody else uses."""

    cache: AnswerCache
    model: str = field(default_factory=lambda: f"m{secrets.token_hex(4)}")

    async def put(self, key: str, letter: bytes = b"x", **how: int) -> int | None:
        """Keep an entry that counts for `SIZE` bytes."""
        value = letter * (how.get("size", SIZE) - ENTRY_OVERHEAD_BYTES)
        stored = Stored(value, how.get("stored_ms", 7))
        return await self.cache.put(self.model, key, stored, how.get("ttl_ms", TTL_MS), how.get("bytes_max", 10 * SIZE))

    async def kept(self, *keys: str) -> set[str]:
        """Which of these are kept."""
        return {key for key in keys if await self.cache.get(self.model, key) is not None}


@pytest.mark.asyncio(loop_scope="class")
class CacheContract:
    """See the module."""

    async def test_what_is_kept_is_found_whole_with_its_time(self, store: Store) -> None:
        stored = Stored(bytes(range(256)) * 40, 1_800_000_000_123)
        assert await store.cache.get(store.model, "k") is None
        assert await store.cache.put(store.model, "k", stored, TTL_MS, 1 << 20) == 10_240 + ENTRY_OVERHEAD_BYTES
        assert await store.cache.get(store.model, "k") == stored
        assert await store.cache.get(store.model, "other") is None
        assert await store.cache.get(f"{store.model}x", "k") is None

    async def test_the_newest_value_of_a_name_counts(self, store: Store) -> None:
        await store.put("k", b"a", stored_ms=1)
        assert await store.put("k", b"b", stored_ms=2) == SIZE
        assert await store.cache.get(store.model, "k") == Stored(b"b" * VALUE, 2)
        assert await store.put("k", b"c", stored_ms=1, size=SIZE + 1) == SIZE, "told earlier, come later"
        assert await store.cache.get(store.model, "k") == Stored(b"b" * VALUE, 2)
        await store.put("k", b"d", stored_ms=2)
        assert await store.cache.get(store.model, "k") == Stored(b"d" * VALUE, 2)

    async def test_an_entry_expires(self, store: Store) -> None:
        await store.put("soon", ttl_ms=80)
        await store.put("late")
        assert await store.kept("soon", "late") == {"soon", "late"}
        await asyncio.sleep(0.15)
        assert await store.kept("soon", "late") == {"late"}
        assert await store.put("more") == 2 * SIZE, "what has expired takes no room"

    async def test_a_models_entries_stay_within_its_bytes_and_the_least_used_go(self, store: Store) -> None:
        for key in "abc":
            await store.put(key, bytes_max=3 * SIZE)
        assert await store.kept("a") == {"a"}, "and is used by that"
        assert await store.put("d", bytes_max=3 * SIZE) == 3 * SIZE
        assert await store.kept(*"abcd") == {"a", "c", "d"}

    async def test_a_large_entry_takes_the_room_of_several(self, store: Store) -> None:
        for key in "abcd":
            await store.put(key, bytes_max=4 * SIZE)
        assert await store.put("e", bytes_max=4 * SIZE, size=3 * SIZE) == 4 * SIZE
        assert await store.kept(*"abcde") == {"d", "e"}

    async def test_what_alone_is_too_large_is_not_kept_and_displaces_its_name_alone(self, store: Store) -> None:
        await store.put("a", bytes_max=2 * SIZE)
        await store.put("b", bytes_max=2 * SIZE)
        assert await store.put("a", bytes_max=2 * SIZE, size=2 * SIZE + 1) == SIZE
        assert await store.kept("a", "b") == {"b"}

    async def test_a_models_bytes_may_change(self, store: Store) -> None:
        for key in "abcd":
            await store.put(key, bytes_max=4 * SIZE)
        assert await store.put("e", bytes_max=2 * SIZE) == 2 * SIZE
        assert await store.put("f", bytes_max=4 * SIZE) == 3 * SIZE
        assert {"e", "f"} <= await store.kept(*"abcdef")

    async def test_models_dont_displace_each_other(self, store: Store) -> None:
        other = Store(store.cache)
        await other.put("k", bytes_max=SIZE)
        for key in "abc":
            await store.put(key, bytes_max=SIZE)
        assert await other.kept("k") == {"k"}
        assert await store.kept(*"abc") == {"c"}

    async def test_many_at_once_keep_the_sum_right(self, store: Store) -> None:
        keys = [f"k{number % 20}" for number in range(100)]
        totals = await asyncio.gather(*(store.put(key, bytes_max=7 * SIZE) for key in keys))
        assert all(total is not None and total <= 7 * SIZE for total in totals)
        kept = await store.kept(*keys)
        assert await store.put("last", bytes_max=100 * SIZE) == (len(kept) + 1) * SIZE
