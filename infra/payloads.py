"""Puts events that are too large for a record into the object store, and gets them back. `EventProducer` and `EventDecoder` use it.

A store that is away is waited for, by all of a process's readers and writers together: for `patience_s` from when it was first missed. After
that each call fails at once, but for one a second that looks whether it is back. So whatever stands in a partition holds it up once and not for
each of its records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from infra import metrics
from infra.objects import ObjectDamaged, ObjectMissing, ObjectStore, StoreAway, make_store
from infra.settings import ProcessSettings
from infra.undelivered import RecordTooLarge
from schemas.codec import Codec
from schemas.events import PayloadStored
from schemas.payloads import OBJECT_MAX_BYTES, PayloadUnreadable, Stored, claim, key_of, outline_of, whole
from schemas.reasons import Reason

PATIENCE_S = 15.0
BACKOFF_S = 0.2
BACKOFF_MAX_S = 1.0
PROBE_S = 1.0
"""How often a store that has been away for long is asked again."""

T = TypeVar("T")

log = structlog.get_logger("payloads")


class Payloads:
    """The payloads of all tenants. For one event loop; safe for any number of its tasks."""

    def __init__(self, store: ObjectStore, patience_s: float = PATIENCE_S) -> None:
        self.store = store
        self._patience_s = patience_s
        self._away_since_s: float | None = None
        self._probe_s = 0.0

    @classmethod
    def of(cls, settings: ProcessSettings) -> Payloads:
        """Those of the store that a process's settings name. Raises HeadraceError (invalid_request)."""
        return cls(make_store(settings.objects, settings.data_dir))

    async def put(self, event: Stored, encoded: bytes | None, tenant: str, encoding: str = "avro") -> PayloadStored:
        """Store an event's payload; the reference to it. Raises HeadraceError: `StoreAway`, `RecordTooLarge`, and invalid_request for what can't be encoded."""
        reference, content = await asyncio.to_thread(claim, event, encoded, tenant, encoding)
        if len(content) > OBJECT_MAX_BYTES:
            raise RecordTooLarge(
                f"{type(event).__name__} has {len(content)} bytes; a payload has at most {OBJECT_MAX_BYTES}"
            )
        await self._patiently(lambda: self.store.put(key_of(reference), content))
        metrics.PAYLOADS.labels("stored").inc()
        return reference

    async def get(self, reference: PayloadStored, codec: Codec) -> Stored:
        """The event that a reference stands for. Raises `PayloadUnreadable`; `Undecodable` for a reference, or an object, that is none."""
        key = key_of(reference)
        try:
            content = await self._patiently(lambda: self.store.get(key, reference.digest, reference.size_bytes))
        except (ObjectMissing, ObjectDamaged) as error:
            raise self._unreadable(Reason.PAYLOAD_LOST, error.message, reference, codec) from error
        except StoreAway as error:
            raise self._unreadable(Reason.UNAVAILABLE, error.message, reference, codec) from error
        metrics.PAYLOADS.labels("read").inc()
        return await asyncio.to_thread(whole, reference, content, codec)

    def _unreadable(self, reason: Reason, why: str, reference: PayloadStored, codec: Codec) -> PayloadUnreadable:
        """People are told the key; callers, what to do."""
        log.error("a payload can't be read", request_id=reference.request_id, payload=reference.event, error=why)
        metrics.PAYLOADS.labels(reason.value).inc()
        text = (
            Reason.PAYLOAD_LOST.text
            if reason is Reason.PAYLOAD_LOST
            else "The object store can't be reached at present."
        )
        return PayloadUnreadable(reason, text, reference, outline_of(reference, codec))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        loop, backoff_s = asyncio.get_running_loop(), BACKOFF_S
        if self._impatient and loop.time() < self._probe_s:
            raise StoreAway(f"{self.store.name} has been away for more than {self._patience_s:g} s")
        while True:
            self._probe_s = loop.time() + PROBE_S
            try:
                result = await call()
            except StoreAway as error:
                if self._away_since_s is None:
                    self._away_since_s = loop.time()
                    log.warning("the object store is away", error=error.message)
                if self._impatient:
                    raise
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            except (ObjectMissing, ObjectDamaged):
                self._away_since_s = None
                raise
            else:
                self._away_since_s = None
                return result

    @property
    def _impatient(self) -> bool:
        since_s = self._away_since_s
        return since_s is not None and asyncio.get_running_loop().time() > since_s + self._patience_s

    async def close(self) -> None:
        """Close the store."""
        await self.store.close()
