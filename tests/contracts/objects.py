"""What every object store does. A backend's tests inherit `ObjectStoreContract` and give a fixture `store`."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from dataclasses import dataclass

import pytest

from infra.objects import ObjectDamaged, ObjectMissing, ObjectStore
from schemas.errors import HeadraceError
from schemas.reasons import Reason

CLOCK_MS = 5_000
"""By how much the store's clock may differ from this machine's."""


@dataclass
class Shelf:
    """A store, and its words for what was put behind its back."""

    store: ObjectStore

    async def put(self, key: str, body: bytes) -> tuple[str, str, int]:
        """Store a body; what `get` takes."""
        await self.store.put(key, body)
        return key, hashlib.sha256(body).hexdigest(), len(body)

    async def keys(self, prefix: str) -> set[str]:
        return {found.key async for found in self.store.listed(prefix)}


class ObjectStoreContract:
    """Every store passes these."""

    @pytest.mark.parametrize("size", [1, 1_000, 768 * 1024, 768 * 1024 + 1, 9 * 1024 * 1024])
    async def test_what_is_put_is_got(self, shelf: Shelf, size: int) -> None:
        body = secrets.token_bytes(size)
        assert await shelf.store.get(*await shelf.put("a/b/c", body)) == body

    async def test_a_put_replaces(self, shelf: Shelf) -> None:
        first = await shelf.put("a/key", b"one")
        second = await shelf.put("a/key", b"another")
        assert await shelf.store.get(*second) == b"another"
        with pytest.raises(ObjectDamaged):
            await shelf.store.get(*first)

    async def test_many_at_once(self, shelf: Shelf) -> None:
        bodies = {f"many/{number}": secrets.token_bytes(50_000) for number in range(40)}
        refs = await asyncio.gather(*(shelf.put(key, body) for key, body in bodies.items()))
        assert await asyncio.gather(*(shelf.store.get(*ref) for ref in refs)) == list(bodies.values())

    async def test_of_two_puts_at_once_one_is_whole(self, shelf: Shelf) -> None:
        bodies = [bytes((number,)) * 300_000 for number in range(8)]
        refs = await asyncio.gather(*(shelf.put("same/key", body) for body in bodies))
        got = []
        for ref in refs:
            try:
                got.append(await shelf.store.get(*ref))
            except ObjectDamaged:
                continue
        assert len(got) == 1

    @pytest.mark.parametrize("key", ["nothing", "a/nothing", "taken", "taken/b/c"])
    async def test_what_is_not_there_is_missing(self, shelf: Shelf, key: str) -> None:
        await shelf.put("taken/b", b"x")
        with pytest.raises(ObjectMissing) as caught:
            await shelf.store.get(key, "0" * 64, 10)
        assert not caught.value.retriable

    @pytest.mark.parametrize("difference", [-1, 1])
    async def test_another_size_is_damage(self, shelf: Shelf, difference: int) -> None:
        key, digest, size = await shelf.put("a/sized", b"x" * 1000)
        with pytest.raises(ObjectDamaged) as caught:
            await shelf.store.get(key, digest, size + difference)
        assert caught.value.retriable

    async def test_another_digest_is_damage(self, shelf: Shelf) -> None:
        key, _, size = await shelf.put("a/known", b"x" * 1000)
        with pytest.raises(ObjectDamaged, match="digest mismatch"):
            await shelf.store.get(key, hashlib.sha256(b"y" * 1000).hexdigest(), size)

    async def test_what_is_deleted_is_gone_and_deleting_again_is_fine(self, shelf: Shelf) -> None:
        ref = await shelf.put("a/gone", b"x")
        await shelf.store.delete("a/gone")
        await shelf.store.delete("a/gone")
        await shelf.store.delete("never/there")
        with pytest.raises(ObjectMissing):
            await shelf.store.get(*ref)
        assert await shelf.keys("a") == set()

    async def test_a_listing_tells_sizes_and_times(self, shelf: Shelf) -> None:
        before_ms = time.time() * 1000
        for name in ("one", "two", "deep/er/three"):
            await shelf.put(f"list/{name}", b"x" * len(name))
        await shelf.put("listless/four", b"x")
        found = {item.key: item async for item in shelf.store.listed("list")}
        assert {key: item.size_bytes for key, item in found.items()} == {
            "list/one": 3,
            "list/two": 3,
            "list/deep/er/three": 13,
        }
        for item in found.values():
            assert before_ms - CLOCK_MS < item.modified_ms < time.time() * 1000 + CLOCK_MS

    async def test_a_put_of_the_same_is_new_again(self, shelf: Shelf) -> None:
        await shelf.put("age/key", b"x")
        (old,) = [item async for item in shelf.store.listed("age")]
        await asyncio.sleep(1.2)  # S3 tells seconds
        await shelf.put("age/key", b"x")
        (new,) = [item async for item in shelf.store.listed("age")]
        assert new.modified_ms > old.modified_ms

    async def test_nothing_is_listed_where_nothing_is(self, shelf: Shelf) -> None:
        assert await shelf.keys("nowhere") == set()

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/a", "a/", "a//b", "..", "a/../b", "../a", "a/./b", ".a", "a b", "ä", "a\n", "a" * 600, "a\\b"],
    )
    async def test_what_is_no_key_is_refused(self, shelf: Shelf, key: str) -> None:
        for call in (
            lambda: shelf.store.put(key, b"x"),
            lambda: shelf.store.get(key, "0" * 64, 1),
            lambda: shelf.store.delete(key),
        ):
            with pytest.raises(HeadraceError) as caught:
                await call()
            assert caught.value.reason is Reason.INVALID_REQUEST
