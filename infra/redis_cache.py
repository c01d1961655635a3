"""The response cache's store in Redis, for any number of processes: entries expire there, and a script keeps each model within its bytes.

Of each model there are, beside the entries, their sizes (a hash, with the sum under ""), the order in which they were asked for and that in
which they expire (sorted sets). All have the model in braces, so that in a cluster they are in one place. Whatever Redis drops by itself makes
a sum too large at most: then entries go a little early.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from infra.answer_cache import SETTING, Stored, entry_bytes
from infra.settings import SettingsError

TIMEOUT_S = 0.1
"""How long Redis may take: whoever asks would rather have the answer computed."""
PAUSE_S = 1.0
"""After a failure it isn't asked for so long."""
CONNECTIONS_MAX = 16
EXPIRED_AT_ONCE_MAX = 100
STORED_BYTES = 8

_GET = """
local value = redis.call('GET', KEYS[1])
if value then
  local now = redis.call('TIME')
  redis.call('ZADD', KEYS[2], 'XX', now[1] * 1000000 + now[2], ARGV[1])
end
return value
"""
_PUT = f"""
local sizes, used, ends, prefix = KEYS[2], KEYS[3], KEYS[4], ARGV[6]
local name, value, size, ttl_ms, bytes_max = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local function sum() return tonumber(redis.call('HGET', sizes, '') or '0') end
local function drop(which)
  local was = redis.call('HGET', sizes, which)
  if was then
    redis.call('HINCRBY', sizes, '', -was)
    redis.call('HDEL', sizes, which)
  end
  redis.call('ZREM', used, which)
  redis.call('ZREM', ends, which)
  redis.call('DEL', prefix .. which)
end
for _, which in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, {EXPIRED_AT_ONCE_MAX})) do drop(which) end
local told = redis.call('GETRANGE', KEYS[1], 0, {STORED_BYTES - 1})
if #told == {STORED_BYTES} and struct.unpack('>I{STORED_BYTES}', told) > struct.unpack('>I{STORED_BYTES}', value) then return sum() end
drop(name)
if size <= bytes_max then
  redis.call('SET', KEYS[1], value, 'PX', ttl_ms)
  redis.call('HSET', sizes, name, size)
  redis.call('HINCRBY', sizes, '', size)
  redis.call('ZADD', used, now, name)
  redis.call('ZADD', ends, now + ttl_ms * 1000, name)
end
while sum() > bytes_max do
  local oldest = redis.call('ZRANGE', used, 0, 0)[1]
  if not oldest then
    redis.call('DEL', sizes, ends)
    break
  end
  drop(oldest)
end
for _, key in ipairs({{sizes, used, ends}}) do
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end
return sum()
"""

log = structlog.get_logger("cache")


class RedisCache:
    """Keeps them in Redis. It connects when it is first asked, and again after a failure."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """The address may hold a password, which is told nobody. Raises SettingsError for one that makes no sense."""
        self._timeout_s = timeout_s
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                max_connections=CONNECTIONS_MAX,
                retry=Retry(NoBackoff(), 0),
            )
        except (ValueError, TypeError):
            raise SettingsError(f"{SETTING} takes redis://HOST:PORT/NUMBER") from None
        self._get = self._redis.register_script(_GET)
        self._put = self._redis.register_script(_PUT)
        self._away_until_s = 0.0
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)

    async def get(self, model: str, key: str) -> Stored | None:
        """What is kept, or None; also if Redis doesn't say so at once."""
        found = await self._ask(self._get, [_entry(model, key), _of(model, "used")], [key])
        if not isinstance(found, bytes) or len(found) < STORED_BYTES:
            return None
        return Stored(found[STORED_BYTES:], int.from_bytes(found[:STORED_BYTES], "big"))

    async def put(self, model: str, key: str, stored: Stored, ttl_ms: int, bytes_max: int) -> int | None:
        """Keep a value, if Redis takes it at once."""
        keys = [_entry(model, key), *(_of(model, what) for what in ("sizes", "used", "ends"))]
        value = stored.stored_ms.to_bytes(STORED_BYTES, "big") + stored.value
        arguments = [key, value, entry_bytes(stored), ttl_ms, bytes_max, _entry(model, "")]
        total = await self._ask(self._put, keys, arguments)
        return total if isinstance(total, int) else None

    async def _ask(self, script: AsyncScript, keys: list[str], arguments: list[Any]) -> object:
        """What the script gives, or None: while Redis is away it isn't asked, and nobody waits for it."""
        if time.monotonic() < self._away_until_s:
            return None
        try:
            async with asyncio.timeout(2 * self._timeout_s), self._room:
                found: object = await script(keys=keys, args=arguments)
        except (RedisError, OSError, TimeoutError) as error:
            if time.monotonic() >= self._away_until_s:
                log.warning("the response cache can't be reached", error=type(error).__name__, pause_s=PAUSE_S)
            self._away_until_s = time.monotonic() + PAUSE_S
            return None
        return found

    async def close(self) -> None:
        """Disconnect. What is kept stays there."""
        await self._redis.aclose()


def _entry(model: str, key: str) -> str:
    return f"headrace:cache:{{{model}}}:answer:{key}"


def _of(model: str, what: str) -> str:
    return f"headrace:cache:{{{model}}}:{what}"
