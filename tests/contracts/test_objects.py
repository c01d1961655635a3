"""Both object stores do what every one does: a folder, and a bucket of a real S3 server, with a proxy between that spoils answers."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from infra import objects, ports
from infra.objects import GET_TRIES, ObjectDamaged, ObjectMissing, StoreAway
from infra.objects_folder import FolderStore
from infra.objects_s3 import S3Store
from tests.contracts.objects import ObjectStoreContract, Shelf
from tests.faulty import FAULTS, Fault, FaultyProxy, cut
from tests.s3 import BUCKET, SECRET_KEY, S3Server

BODY = bytes(range(1, 251)) * 4_000


class TestFolder(ObjectStoreContract):
    """In a folder."""

    @pytest.fixture
    async def shelf(self, tmp_path: Path) -> AsyncIterator[Shelf]:
        store = FolderStore(tmp_path / "data" / "objects")
        yield Shelf(store)
        await store.close()

    async def test_only_its_owner_reads_it(self, shelf: Shelf, tmp_path: Path) -> None:
        await shelf.put("payloads/tenant/key", b"x")
        root = tmp_path / "data" / "objects"
        modes = {path.relative_to(root).as_posix(): path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}
        assert modes == {".": 0o700, "payloads": 0o700, "payloads/tenant": 0o700, "payloads/tenant/key": 0o600}

    @pytest.mark.parametrize("fault", FAULTS)
    async def test_a_spoilt_file_is_damage(self, shelf: Shelf, tmp_path: Path, fault: Fault) -> None:
        key, digest, size = await shelf.put("a/b", BODY)
        (tmp_path / "data" / "objects" / key).write_bytes(fault(BODY))
        with pytest.raises(ObjectDamaged):
            await shelf.store.get(key, digest, size)
        await shelf.put("a/b", BODY)
        assert await shelf.store.get(key, digest, size) == BODY

    async def test_a_folder_that_cannot_be_written_is_away(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        store = FolderStore(tmp_path / "file")
        with pytest.raises(StoreAway, match="can't be used"):
            await store.put("a/b", b"x")
        await store.close()

    async def test_what_a_put_left_unfinished_can_be_removed(self, shelf: Shelf, tmp_path: Path) -> None:
        await shelf.put("a/b", b"x")
        (tmp_path / "data" / "objects" / "a" / "unfinished-x1_y").write_bytes(b"half")
        for key in await shelf.keys("a"):
            await shelf.store.delete(key)
        assert await shelf.keys("a") == set()


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)


class TestS3(ObjectStoreContract):
    """In a bucket."""

    @pytest.fixture
    async def shelf(self, s3: S3Server, credentials: None) -> AsyncIterator[Shelf]:
        store = S3Store(BUCKET, f"tests/{secrets.token_hex(6)}", s3.endpoint)
        yield Shelf(store)
        await store.close()

    async def test_a_listing_has_pages(self, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infra.objects_s3.PAGE_OBJECTS", 3)
        for number in range(10):
            await shelf.put(f"pages/{number}", b"x")
        assert await shelf.keys("pages") == {f"pages/{number}" for number in range(10)}

    async def test_prefixes_keep_stores_apart(self, shelf: Shelf, s3: S3Server) -> None:
        ref = await shelf.put("a/b", b"x")
        other = S3Store(BUCKET, f"tests/{secrets.token_hex(6)}", s3.endpoint)
        with pytest.raises(ObjectMissing):
            await other.get(*ref)
        await other.close()

    @pytest.mark.parametrize(
        ("bucket", "secret", "word"), [("no-such-bucket", SECRET_KEY, "NoSuchBucket"), (BUCKET, "wr0ng", "Signature")]
    )
    async def test_a_store_that_refuses_says_why_and_no_secret(
        self, s3: S3Server, credentials: None, monkeypatch: pytest.MonkeyPatch, bucket: str, secret: str, word: str
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        store = S3Store(bucket, "tests", s3.endpoint)
        with pytest.raises(StoreAway, match=word) as caught:
            await store.put("a/b", b"x")
        assert secret not in caught.value.message
        with pytest.raises(StoreAway, match=word):
            await store.get("a/b", "0" * 64, 1)
        await store.close()


class TestFaults:
    """The server ends a body at half, gives zeros, flips a bit: nothing of it is taken for what was put, and it is asked again."""

    @pytest.fixture
    async def proxy(self, s3: S3Server) -> AsyncIterator[FaultyProxy]:
        proxy = FaultyProxy(ports.free_port(), s3.port)
        await proxy.start()
        yield proxy
        await proxy.stop()

    @pytest.fixture
    async def shelf(
        self, proxy: FaultyProxy, credentials: None, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Shelf]:
        monkeypatch.setattr(objects, "GET_BACKOFF_S", 0.01)
        store = S3Store(BUCKET, f"tests/{secrets.token_hex(6)}", proxy.endpoint)
        yield Shelf(store)
        await store.close()

    @pytest.mark.parametrize("times", range(1, GET_TRIES + 1))
    @pytest.mark.parametrize("fault", FAULTS)
    async def test_a_spoilt_answer_is_asked_for_again(
        self, shelf: Shelf, proxy: FaultyProxy, fault: Fault, times: int
    ) -> None:
        ref = await shelf.put("a/b", BODY)
        proxy.faults.extend([fault] * times)
        if times < GET_TRIES:
            assert await shelf.store.get(*ref) == BODY
        else:
            with pytest.raises(ObjectDamaged) as caught:
                await shelf.store.get(*ref)
            assert caught.value.retriable
        assert not proxy.faults
        assert await shelf.store.get(*ref) == BODY

    async def test_all_kinds_in_turn(self, shelf: Shelf, proxy: FaultyProxy) -> None:
        ref = await shelf.put("a/b", BODY)
        for fault in FAULTS * 2:
            proxy.faults.append(fault)
            assert await shelf.store.get(*ref) == BODY

    async def test_a_server_that_is_away_is_told_so_and_comes_back(self, shelf: Shelf, proxy: FaultyProxy) -> None:
        ref = await shelf.put("a/b", BODY)
        await proxy.stop()
        calls: tuple[Any, ...] = (
            lambda: shelf.store.get(*ref),
            lambda: shelf.store.put("a/c", BODY),
            lambda: shelf.store.delete("a/b"),
            lambda: shelf.keys("a"),
        )
        for call in calls:
            with pytest.raises(StoreAway, match="can't be reached"):
                await call()
        await proxy.start()
        assert await shelf.store.get(*ref) == BODY

    async def test_a_put_that_breaks_off_leaves_what_was_there(
        self, shelf: Shelf, proxy: FaultyProxy, s3: S3Server
    ) -> None:
        ref = await shelf.put("a/b", BODY)
        proxy.faults.append(cut)
        assert await shelf.store.get(*ref) == BODY
