"""Memory and Redis keep the response cache alike; and what is Redis's own: to be away costs hits and no time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from infra.answer_cache import MemoryCache, Stored, make_cache, shared_by_processes
from infra.redis_cache import RedisCache
from infra.settings import AdmissionSettings, SettingsError
from tests.contracts.cache import TTL_MS, CacheContract, Store
from tests.redis_server import PASSWORD, RedisServer

UNHURRIED_S = 10.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that runs."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


class TestMemory(CacheContract):
    """It does what every store does."""

    @pytest_asyncio.fixture(loop_scope="class")
    async def store(self) -> AsyncIterator[Store]:
        cache = make_cache(AdmissionSettings().cache_url)
        assert isinstance(cache, MemoryCache)
        yield Store(cache)
        await cache.close()


class TestRedis(CacheContract):
    """It does what every store does."""

    @pytest_asyncio.fixture(loop_scope="class")
    async def store(self, redis: RedisServer) -> AsyncIterator[Store]:
        cache = RedisCache(redis.url, timeout_s=UNHURRIED_S)  # what it keeps is asked here, not how soon
        yield Store(cache)
        await cache.close()

    async def test_processes_share_what_is_kept(self, redis: RedisServer) -> None:
        one, two = Store(make_cache(redis.url)), make_cache(redis.url)
        await one.put("k")
        assert await two.get(one.model, "k") is not None
        await one.cache.close()
        await two.close()

    async def test_away_it_knows_nothing_and_nobody_waits_for_it(self, redis: RedisServer) -> None:
        store = Store(make_cache(redis.url))
        await store.put("k")
        redis.kill()
        with capture_logs() as logs:
            began_s = time.monotonic()
            for _ in range(100):
                assert await store.cache.get(store.model, "k") is None
                assert await store.put("k") is None
            assert time.monotonic() - began_s < 0.9, "after one failure it isn't asked for a while"
        assert [log["event"] for log in logs] == ["the response cache can't be reached"]
        assert PASSWORD not in str(logs)
        redis.start()
        async with asyncio.timeout(10):
            while await store.put("k") is None:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.05)
        assert await store.kept("k") == {"k"}
        await store.cache.close()

    async def test_one_that_answers_nothing_is_soon_given_up(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            cache = make_cache(f"redis://127.0.0.1:{silent.getsockname()[1]}")
            began_s = time.monotonic()
            assert await cache.get("m", "k") is None
            assert await cache.put("m", "k", Stored(b"v", 1), TTL_MS, 1_000) is None
            assert time.monotonic() - began_s < 0.8
            await cache.close()

    async def test_what_redis_drops_by_itself_is_no_entry(self, redis: RedisServer) -> None:
        from redis.asyncio import Redis

        store = Store(make_cache(redis.url))
        await store.put("a")
        client = Redis.from_url(redis.url)
        for what in ("sizes", "used", "ends"):
            await client.delete(f"headrace:cache:{{{store.model}}}:{what}")
            assert await store.put("b") is not None
            assert await store.kept("b") == {"b"}
        await client.set(f"headrace:cache:{{{store.model}}}:answer:c", b"cut")
        assert await store.kept("c") == set()
        await client.aclose()
        await store.cache.close()


@pytest.mark.parametrize(
    "url", ["", "memory", "http://h:1/", f"redis://:{PASSWORD}@h:port/0", f"postgres://u:{PASSWORD}@h/x"]
)
def test_an_address_of_no_store_is_refused_and_not_told(url: str) -> None:
    with pytest.raises(SettingsError, match="HEADRACE_ADMISSION_CACHE_URL takes") as raised:
        make_cache(url)
    assert PASSWORD not in str(raised.value)


def test_the_setting_keeps_its_password() -> None:
    settings = AdmissionSettings.from_env(
        {"HEADRACE_ADMISSION_CACHE_URL": f"redis://:{PASSWORD}@h", "HEADRACE_GRANT_SECRET": "x" * 32}
    )
    assert settings.cache_url.endswith("@h")
    assert PASSWORD not in repr(settings)
    assert shared_by_processes(settings.cache_url) and not shared_by_processes("memory://")
