"""A task reads a partition of `tokens`, this bridge's own or another, and hands each record to the calls that wait for it."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, get_args

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition

from bridge.calls import Leg
from decisions.stream import Input
from infra import metrics
from infra.kafka import make_admin, make_consumer
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.codec import HEADER_BYTES, MARKER, fingerprint, own_schemas
from schemas.errors import HeadraceError
from schemas.events import Event, InferenceJoined, PayloadStored
from schemas.reasons import Reason
from schemas.topics import TOKENS

POLL_MS = 1_000
FETCH_WAIT_MS = 2_000
"""How long the broker may hold a fetch while nothing comes; nothing else is asked on its connection."""
RECORDS_A_TURN = 64
"""So many records are handed on before other tasks get their turn."""
FETCHES_MAX = 8
"""Events that are fetched from the object store at once; one more holds the partition back."""
HELD_MAX = 256
"""Records of a request that wait behind its fetched one; one more holds the partition back."""
ID_CHARS = 36

_log = structlog.get_logger(__name__)
_INPUTS: tuple[type[Any], ...] = get_args(Input)
_HEARD = (*_INPUTS, InferenceJoined)
_ID_FIRST = frozenset(
    MARKER + bytes.fromhex(fingerprint(schema))
    for name, schema in own_schemas().items()
    if name in {cls.__name__ for cls in (*_HEARD, PayloadStored)} and schema["fields"][0]["name"] == "request_id"
)
_ID_LENGTH = bytes([ID_CHARS << 1])  # Avro writes a string's length as a zigzag number
_ID_START = HEADER_BYTES + 1


def peek_request_id(value: bytes) -> str | None:
    """The request id of a record that this version wrote, read without decoding it; None if that can't be told."""
    if value[:HEADER_BYTES] not in _ID_FIRST or value[HEADER_BYTES:_ID_START] != _ID_LENGTH:
        return None
    return value[_ID_START : _ID_START + ID_CHARS].decode("ascii", "replace")


async def reply_partition(settings: KafkaSettings, instance: str) -> int:
    """The partition of `tokens` that this bridge reads, by its name: it is the same after a restart. Others may read it too."""
    admin = make_admin(settings)
    await admin.start()
    try:
        found = (await admin.describe_topics([TOKENS]))[0]
    finally:
        await admin.close()
    count = len(found["partitions"])
    if count == 0:
        raise HeadraceError(Reason.UNAVAILABLE, f"the topic {TOKENS} doesn't exist; run `headrace topics ensure`")
    return zlib.crc32(instance.encode()) % count


@dataclass(frozen=True, slots=True)
class _Fetching:
    """A request's event that is being fetched, and what came of the request since."""

    task: asyncio.Task[None]
    held: deque[tuple[Event, int]]


class Dispatcher:
    """Reads one partition of a `tokens` topic from its end and feeds the legs registered here. `start` before the first is produced.

    `on_joined` hears of each leg whose request was asked before, and tells whether the leg is its own from then on.
    """

    def __init__(self, settings: KafkaSettings, partition: int, decoder: EventDecoder, topic: str = TOKENS) -> None:
        self._settings = settings
        self.partition = TopicPartition(topic, partition)
        self._decoder = decoder
        self._legs: dict[str, list[Leg]] = {}
        self._count = 0
        self._consumer: AIOKafkaConsumer | None = None
        self._task: asyncio.Task[None] | None = None
        self._next = 0
        self._fetching: dict[str, _Fetching] = {}
        self.on_joined: OnJoined | None = None

    def __len__(self) -> int:
        """How many legs are fed."""
        return self._count

    @property
    def position(self) -> int:
        """The offset of the next record that legs registered now will get."""
        return self._next

    @property
    def ended(self) -> bool:
        """Whether it reads no more."""
        return self._task is None or self._task.done()

    def register(self, leg: Leg) -> None:
        """Feed this leg from now on."""
        self._legs.setdefault(leg.request_id, []).append(leg)
        self._count += 1

    def unregister(self, leg: Leg) -> None:
        """Feed it no more."""
        legs = self._legs.get(leg.request_id, [])
        if leg in legs:
            legs.remove(leg)
            self._count -= 1
            if not legs:
                del self._legs[leg.request_id]

    def legs(self, request_id: str) -> tuple[Leg, ...]:
        """Those that wait for a request."""
        return tuple(self._legs.get(request_id, ()))

    def fail(self, error: HeadraceError) -> None:
        """Nothing will be read any more: end all that wait for it."""
        for legs in list(self._legs.values()):
            for leg in legs:
                leg.call.fail(error)

    async def start(self) -> asyncio.Task[None]:
        """Stand at the partition's end, then read on in a task, which is returned: it ends only by an error."""
        self._consumer = make_consumer(self._settings, auto_offset_reset="latest", fetch_max_wait_ms=FETCH_WAIT_MS)
        await self._consumer.start()
        self._consumer.assign([self.partition])
        await self._consumer.seek_to_end(self.partition)
        self._next = await self._consumer.position(self.partition)
        self._task = asyncio.create_task(
            self._read(self._consumer), name=f"{self.partition.topic} {self.partition.partition}"
        )
        return self._task

    async def stop(self) -> None:
        """Stop reading; safe to call twice."""
        tasks = [fetching.task for fetching in self._fetching.values()]
        for task in (*([self._task] if self._task is not None else []), *tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._consumer is not None:
            await self._consumer.stop()
        self._task = self._consumer = None

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                for i, record in enumerate(records):
                    if i % RECORDS_A_TURN == RECORDS_A_TURN - 1:
                        await asyncio.sleep(0)
                    await self._hand_on(record.value, record.offset)
                    self._next = record.offset + 1

    async def _hand_on(self, value: bytes | None, offset: int) -> None:
        """Legs that register while a record is decoded get it too: it is then still the next."""
        if value and (found := peek_request_id(value)) is not None and found not in self._legs:
            return
        event = await _read(self._decoder.decode_record(value), self.partition, offset)
        if event is None:
            return
        request_id = getattr(event, "request_id", "")
        while (fetching := self._fetching.get(request_id)) is not None:
            if len(fetching.held) < HELD_MAX:
                fetching.held.append((event, offset))
                return
            await asyncio.wait({fetching.task})
        if isinstance(event, PayloadStored) and request_id in self._legs:
            await self._fetch(event, offset)
        else:
            self._feed(event, offset)

    async def _fetch(self, reference: PayloadStored, offset: int) -> None:
        """Begin to fetch what is in the object store. Other requests' records go on; those of this one are held, in their order, until it is there."""
        request_id = reference.request_id
        while len(self._fetching) >= FETCHES_MAX:
            await asyncio.wait(
                [fetching.task for fetching in self._fetching.values()], return_when=asyncio.FIRST_COMPLETED
            )
        held: deque[tuple[Event, int]] = deque([(reference, offset)])

        async def fetch() -> None:
            try:
                while held:
                    event, at = held[0]
                    found: Event | None = event
                    if isinstance(event, PayloadStored) and request_id in self._legs:
                        found = await _read(self._decoder.whole(event), self.partition, at)
                    held.popleft()
                    if found is not None:
                        self._feed(found, at)
            except Exception as error:  # whatever it was, no caller must wait for ever
                _log.exception("an event can't be fetched", request_id=request_id, error=repr(error))
                for leg in self.legs(request_id):
                    leg.call.fail(HeadraceError(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text))
            finally:
                del self._fetching[request_id]

        self._fetching[request_id] = _Fetching(asyncio.create_task(fetch(), name="fetch"), held)

    def _feed(self, event: Event, offset: int) -> None:
        if isinstance(event, InferenceJoined):
            for leg in self.legs(event.request_id):
                if self.on_joined is not None:
                    self.on_joined(leg, event, self)
        elif isinstance(event, _INPUTS):
            for leg in self.legs(event.request_id):
                leg.call.feed(leg, event, self.partition.partition, offset)


OnJoined = Callable[[Leg, InferenceJoined, Dispatcher], bool]


async def read_input(
    decoder: EventDecoder, value: bytes | None, partition: TopicPartition, offset: int
) -> Input | InferenceJoined | PayloadStored | None:
    """The event of a stream in a record of a `tokens` topic, or the reference to it, or that it has none of its own, or None for any other; what
    can't be read is logged and counted.
    """
    event = await _read(decoder.decode_record(value), partition, offset)
    if isinstance(event, InferenceJoined | PayloadStored):
        return event
    return event if isinstance(event, _INPUTS) else None


async def fetched(
    decoder: EventDecoder, reference: PayloadStored, partition: TopicPartition, offset: int
) -> Input | None:
    """The event of a stream that is in the object store, or None for any other, and for what can't be read."""
    event = await _read(decoder.whole(reference), partition, offset)
    return event if isinstance(event, _INPUTS) else None


async def _read(reading: Awaitable[Event], partition: TopicPartition, offset: int) -> Event | None:
    try:
        return await reading
    except HeadraceError as error:
        metrics.PASSED_OVER.labels(TOKENS).inc()
        _log.warning(
            "skipped a record that can't be read",
            topic=partition.topic,
            partition=partition.partition,
            offset=offset,
            error=error.message,
        )
        return None
