"""Events off the log: of any writer, and what is in the object store too."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict

from aiokafka import ConsumerRecord

from infra import metrics
from infra.payloads import Payloads
from infra.read import Positions, read_to_end
from infra.settings import KafkaSettings
from schemas.codec import Codec
from schemas.errors import Undecodable, UnknownSchema
from schemas.events import Event, PayloadStored, SchemaPublished
from schemas.payloads import PayloadUnreadable, stand_in
from schemas.topics import SCHEMAS

UNKNOWN_SCHEMAS_MAX = 1024
UNKNOWN_RECHECK_S = 5.0


class EventDecoder:
    """Reads events of any writer: those it can't know from its own schemas it looks up in the topic `schemas`.

    With `payloads` it also reads what is in the object store; without, a `PayloadStored` stays what it is.
    """

    def __init__(self, settings: KafkaSettings, payloads: Payloads | None = None) -> None:
        self.codec = Codec()
        self._payloads = payloads
        self._settings = settings
        self._positions: Positions = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()  # fingerprint: when to look again, in loop time
        self._read_since_s = 0.0  # when the last reading of the topic began, in loop time
        self._lock = asyncio.Lock()

    async def decode(self, value: bytes | None) -> Event:
        """The event in a record's value. Raises `Undecodable` for anything else; HeadraceError (unavailable) if the
        schema isn't known here and the topic `schemas` can't be read.

        For topics whose writers are trusted. An event that can't be read from the object store is `PayloadUnreadable`, or
        what stands for it in a stream (`schemas.payloads.stand_in`).
        """
        return await self.whole(await self.decode_record(value))

    async def whole(self, event: Event) -> Event:
        """What `decode` makes of a record's own event."""
        if self._payloads is None or not isinstance(event, PayloadStored):
            return event
        try:
            return await self.follow(event)
        except PayloadUnreadable as lost:
            if (stands := stand_in(lost)) is None:
                raise
            return stands

    async def decode_record(self, value: bytes | None) -> Event:
        """`decode`, of what the record itself holds."""
        try:
            return self.codec.decode(value)
        except UnknownSchema as unknown:
            await self._look_up(unknown.fingerprint)
        return self.codec.decode(value)

    async def follow(self, reference: PayloadStored) -> Event:
        """The event that is in the object store. Who follows a caller's reference has looked at it first (`schemas.payloads.refusal`).

        Raises `PayloadUnreadable`, `Undecodable`, and HeadraceError as `decode`.
        """
        assert self._payloads is not None, "there is no object store"
        try:
            return await self._payloads.get(reference, self.codec)
        except UnknownSchema as unknown:
            await self._look_up(unknown.fingerprint)
        return await self._payloads.get(reference, self.codec)

    async def decode_or_pass_over(self, record: ConsumerRecord) -> Event | None:
        """The event of a record; None, counted, for one that is no event of ours. Raises HeadraceError as `decode`."""
        try:
            return await self.decode(record.value)
        except Undecodable:
            metrics.PASSED_OVER.labels(record.topic).inc()
            return None

    async def _look_up(self, fingerprint: str) -> None:
        """Learn what is new in the topic; a fingerprint that isn't there is not looked for again for a while."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self._lock:
            if self.codec.knows(fingerprint) or loop.time() < self._unknown.get(fingerprint, 0.0):
                return
            if self._read_since_s < asked_s:  # else one reading served all who came before it
                began_s = loop.time()
                await self._learn_new()
                self._read_since_s = began_s
            if not self.codec.knows(fingerprint):
                self._unknown[fingerprint] = loop.time() + UNKNOWN_RECHECK_S
                self._unknown.move_to_end(fingerprint)
                while len(self._unknown) > UNKNOWN_SCHEMAS_MAX:
                    self._unknown.popitem(last=False)

    async def _learn_new(self) -> None:
        async for record in read_to_end(self._settings, SCHEMAS, self._positions):
            with contextlib.suppress(Undecodable):
                event = self.codec.decode(record.value)
                if isinstance(event, SchemaPublished):
                    self.codec.learn(event)
