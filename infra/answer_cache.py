"""The store behind the response cache: a port, and the store in this process's memory.

It keeps bytes under names, model by model, each for a time and all of a model's in so many bytes; of more, what was not asked for the longest
goes. Losing it, or any part of it, costs hits and never an answer: a store that can't be reached knows nothing and keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from cachetools import TLRUCache

from infra.settings import SettingsError

ENTRY_OVERHEAD_BYTES = 256
"""What an entry takes beside its value: its name, and its places in the order of use and of age."""
MEMORY, REDIS, REDIS_TLS = "memory", "redis", "rediss"
SETTING = "HEADRACE_ADMISSION_CACHE_URL"


@dataclass(frozen=True, slots=True)
class Stored:
    """A value, and the time it was told, in milliseconds since 1970."""

    value: bytes
    stored_ms: int


class AnswerCache(Protocol):
    """See the module. Neither call raises for a store that fails, nor waits long for it."""

    async def get(self, model: str, key: str) -> Stored | None:
        """What is kept, or None."""

    async def put(self, model: str, key: str, stored: Stored, ttl_ms: int, bytes_max: int) -> int | None:
        """Keep a value for so long, all of the model's in so many bytes: how many those are now, None if that isn't known.

        A value that alone is larger isn't kept. Of a name's values the newest told counts, in whatever order they come: answers come in
        many partitions.
        """

    async def close(self) -> None:
        """Let go of what it holds."""


def entry_bytes(stored: Stored) -> int:
    """What an entry counts for."""
    return len(stored.value) + ENTRY_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class _Kept:
    stored: Stored
    expires_s: float


class MemoryCache:
    """Keeps them in this process, which alone sees them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._models: dict[str, TLRUCache[str, _Kept]] = {}

    async def get(self, model: str, key: str) -> Stored | None:
        """What is kept, or None."""
        kept = self._models[model].get(key) if model in self._models else None
        return kept.stored if kept is not None else None

    async def put(self, model: str, key: str, stored: Stored, ttl_ms: int, bytes_max: int) -> int | None:
        """Keep a value; what has expired goes first, then what was not asked for the longest."""
        found = self._models.get(model)
        if found is None or found.maxsize != bytes_max:
            found = self._models[model] = self._sized(found, bytes_max)
        found.expire()
        before = found.get(key)
        if before is not None and before.stored.stored_ms > stored.stored_ms:
            return int(found.currsize)
        if entry_bytes(stored) <= bytes_max:
            found[key] = _Kept(stored, self._clock() + ttl_ms / 1000)
        else:
            found.pop(key, None)
        return int(found.currsize)

    def _sized(self, before: TLRUCache[str, _Kept] | None, bytes_max: int) -> TLRUCache[str, _Kept]:
        """A model's store, with what there was as far as it has room."""
        made: TLRUCache[str, _Kept] = TLRUCache(
            bytes_max, lambda _key, kept, _now: kept.expires_s, self._clock, lambda kept: entry_bytes(kept.stored)
        )
        for key, kept in list(before.items()) if before is not None else ():
            if entry_bytes(kept.stored) <= bytes_max:
                made[key] = kept
        return made

    async def close(self) -> None:
        """Forget everything."""
        self._models.clear()


def make_cache(url: str) -> AnswerCache:
    """The store at `memory://`, `redis://host:port/number` or `rediss://…`. Raises SettingsError, which never tells the address."""
    scheme = urlsplit(url).scheme
    if scheme == MEMORY:
        return MemoryCache()
    if scheme not in (REDIS, REDIS_TLS):
        raise SettingsError(f"{SETTING} takes memory://, redis://HOST:PORT/NUMBER or rediss://HOST:PORT/NUMBER")
    try:
        from infra.redis_cache import RedisCache
    except ImportError as error:
        raise SettingsError(
            f"{SETTING} names Redis, whose client isn't installed: install headrace with the extra `stores`"
        ) from error
    return RedisCache(url)


def shared_by_processes(url: str) -> bool:
    """Whether several processes see the same entries: then one of them has to bring each."""
    return urlsplit(url).scheme != MEMORY
