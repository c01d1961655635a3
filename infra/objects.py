"""The object store: bytes by key, in a folder or behind S3's API. What is read is verified by size and SHA-256, or it isn't read.

A store is for one event loop and any number of its tasks; what blocks runs in threads, of which there are few. `make_store` chooses by an
address: `file:///…` (`infra/objects_folder.py`) or `s3://bucket/prefix` (`infra/objects_s3.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from schemas.errors import HeadraceError
from schemas.reasons import Reason

if TYPE_CHECKING:
    from infra.settings import ObjectSettings

THREADS = 8
GET_TRIES = 3
GET_BACKOFF_S = 0.2
KEY_CHARS_MAX = 512
DEFAULT_FOLDER = "objects"
"""The folder below the data directory that is the store where no other is named."""

T = TypeVar("T")

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

log = structlog.get_logger("objects")


class ObjectMissing(HeadraceError):
    """There is no such object."""

    def __init__(self, key: str) -> None:
        super().__init__(Reason.NOT_FOUND, f"the object store has no object {key}")


class ObjectDamaged(HeadraceError):
    """What the store gives isn't what was put there. Another try may give it: a connection or a replica can be at fault."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


class StoreAway(HeadraceError):
    """The store can't be reached, or refuses: the message says which, and never a secret. Another try may help."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


@dataclass(frozen=True, slots=True)
class Listed:
    """One object as listed; the time is the store's own, of the last put."""

    key: str
    size_bytes: int
    modified_ms: int


class ObjectStore(ABC):
    """The port. All calls raise HeadraceError: `StoreAway`, and what they name. Keys are words parted by `/`."""

    def __init__(self, name: str) -> None:
        """`name` tells people which store it is."""
        self.name = name
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="objects")

    async def put(self, key: str, body: bytes) -> None:
        """Store an object whole, or not at all. One of that key is replaced, and its time with it."""
        await self._run(self._put, _checked(key), body)

    async def get(self, key: str, sha256: str, size_bytes: int) -> bytes:
        """An object of this digest (lower-case hex) and size. Raises `ObjectMissing`; `ObjectDamaged` after `GET_TRIES` that gave anything else."""
        tries = 1
        while True:
            try:
                return await self._run(self._get_verified, _checked(key), sha256, size_bytes)
            except ObjectDamaged as error:
                log.warning("an object can't be read", store=self.name, attempt=tries, error=error.message)
                if tries == GET_TRIES:
                    raise
            await asyncio.sleep(GET_BACKOFF_S * tries)
            tries += 1

    def _get_verified(self, key: str, sha256: str, size_bytes: int) -> bytes:
        body = self._get(key, size_bytes + 1)
        if len(body) != size_bytes:
            what = f"{len(body)} bytes" if len(body) < size_bytes else "more bytes"
            raise ObjectDamaged(f"the object {key} is damaged: the store gave {what}, and {size_bytes} were put")
        if (found := hashlib.sha256(body).hexdigest()) != sha256:
            raise ObjectDamaged(f"digest mismatch: the object {key} is damaged: its SHA-256 is {found}")
        return body

    async def delete(self, key: str) -> None:
        """Remove an object; one that isn't there is removed already."""
        await self._run(self._delete, _checked(key))

    async def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """Every object whose key begins with the words `prefix`, in no order; those put or removed meanwhile may be among them."""
        page: str | None = ""
        while page is not None:
            found, page = await self._run(self._page, _checked(prefix), page)
            for each in found:
                if _KEY.fullmatch(each.key):  # else somebody else put it there
                    yield each

    async def close(self) -> None:
        """Wait for no one; calls under way may fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # --- in a thread -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _put(self, key: str, body: bytes) -> None:
        """See `put`."""

    @abstractmethod
    def _get(self, key: str, bytes_max: int) -> bytes:
        """The object's bytes as the store gives them, no more than so many. Raises `ObjectMissing`; `ObjectDamaged` if they break off."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """See `delete`."""

    @abstractmethod
    def _page(self, prefix: str, page: str) -> tuple[list[Listed], str | None]:
        """One page of a listing, and where the next begins; None if there is none. The first is ""."""


def _checked(key: str) -> str:
    if len(key) > KEY_CHARS_MAX or not _KEY.fullmatch(key):
        raise HeadraceError(
            Reason.INVALID_REQUEST,
            f"{key[:80]!r} is no key: it has words of letters, digits, '.', '_', '-', parted by '/'",
        )
    return key


def make_store(settings: ObjectSettings | None, data_dir: Path) -> ObjectStore:
    """The store that the settings name, else the folder below the data directory. Raises HeadraceError (invalid_request)."""
    from infra.objects_folder import FolderStore

    if settings is None:
        return FolderStore(data_dir / DEFAULT_FOLDER)
    if settings.bucket is None:
        return FolderStore(Path(settings.path))
    from infra.objects_s3 import S3Store

    return S3Store(settings.bucket, settings.path, settings.endpoint)
