"""Payloads that no record refers to any more are removed, and no others, from either store."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from infra.objects_folder import FolderStore
from infra.objects_s3 import S3Store
from infra.settings import LifecycleSettings
from infra.topics import topic_config
from schemas.topics import ANSWERS, DAY_MS, HOUR_MS, core_topics
from streams import payloads as module
from streams.payloads import sweep, sweep_regularly
from tests.s3 import BUCKET, S3Server

OLD_S = 9 * 86_400


async def test_a_folder_is_swept_of_what_is_old(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for key in ("payloads/a/old", "payloads/a/new", "payloads/b/old", "artifacts/old"):
        await store.put(key, b"x")
        if key.endswith("old"):
            os.utime(tmp_path / key, (time.time() - OLD_S, time.time() - OLD_S))
    (tmp_path / "payloads/a/unfinished-x").write_bytes(b"half")
    os.utime(tmp_path / "payloads/a/unfinished-x", (1, 1))
    assert await sweep(store, int(time.time() * 1000) - 8 * 86_400_000) == 3
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"payloads/a/new", "artifacts/old"}
    await store.close()


async def test_a_bucket_is_swept_too(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    store = S3Store(BUCKET, "sweeping", s3.endpoint)
    for key in ("payloads/a/one", "payloads/b/two", "artifacts/three"):
        await store.put(key, b"x")
    now_ms = int(time.time() * 1000)
    assert await sweep(store, now_ms - 3_600_000) == 0
    assert await sweep(store, now_ms + 3_600_000) == 2
    assert [found.key async for found in store.listed("artifacts")] == ["artifacts/three"]
    await store.close()


async def test_it_goes_on_after_a_store_was_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_SWEEP_S", 0.0)
    (tmp_path / "objects").write_bytes(b"no folder")
    settings = LifecycleSettings(data_dir=tmp_path, sweep_interval_ms=20, payload_retention_ms=0)
    sweeping = asyncio.ensure_future(sweep_regularly(settings))
    await asyncio.sleep(0.1)
    assert not sweeping.done()
    (tmp_path / "objects").unlink()
    old = tmp_path / "objects/payloads/a/old"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x")
    async with asyncio.timeout(10):
        while old.exists():  # noqa: ASYNC110  # the sweep tells nobody
            await asyncio.sleep(0.02)
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)


async def test_what_an_answer_refers_to_is_there_for_as_long_as_the_answer_and_that_is_more_than_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that was away for a day or two loses nothing, by whatever way its results come."""
    monkeypatch.setattr(module, "FIRST_SWEEP_S", 0.0)
    (kept_ms,) = (int(topic_config(spec)["retention.ms"]) for spec in core_topics() if spec.name == ANSWERS)
    assert kept_ms >= 3 * DAY_MS
    ages_ms = {"day": DAY_MS, "days": 2 * DAY_MS, "last": kept_ms + HOUR_MS, "old": kept_ms + 2 * DAY_MS}
    folder = tmp_path / "objects/payloads/a"
    folder.mkdir(parents=True)
    for name, age_ms in ages_ms.items():
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (at_s := time.time() - age_ms / 1000, at_s))
    sweeping = asyncio.ensure_future(sweep_regularly(LifecycleSettings(data_dir=tmp_path)))
    async with asyncio.timeout(10):
        while (folder / "old").exists():  # noqa: ASYNC110  # the sweep tells nobody
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    assert sorted(path.name for path in folder.iterdir()) == ["day", "days", "last"]
