"""A task reads a partition of `tokens`, this bridge's own or another, and hands each record to the calls that wait for it."""

from __future__ import annotations

import asyncio
import zlib
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
from schemas.reasons import Reason
from schemas.topics import TOKENS

POLL_MS = 1_000
FETCH_WAIT_MS = 2_000
"""How long the broker may hold a fetch while nothing comes; nothing else is asked on its connection."""
RECORDS_A_TURN = 64
"""So many records are handed on before other tasks get their turn."""
ID_CHARS = 36

_log = structlog.get_logger(__name__)
_INPUTS: tuple[type[Any], ...] = get_args(Input)
_ID_FIRST = frozenset(
    MARKER + bytes.fromhex(fingerprint(schema))
    for name, schema in own_schemas().items()
    if name in {cls.__name__ for cls in _INPUTS} and schema["fields"][0]["name"] == "request_id"
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


class Dispatcher:
    """Reads one partition of a `tokens` topic from its end and feeds the legs registered here. `start` before the first is produced."""

    def __init__(self, settings: KafkaSettings, partition: int, decoder: EventDecoder, topic: str = TOKENS) -> None:
        self._settings = settings
        self.partition = TopicPartition(topic, partition)
        self._decoder = decoder
        self._legs: dict[str, list[Leg]] = {}
        self._count = 0
        self._consumer: AIOKafkaConsumer | None = None
        self._task: asyncio.Task[None] | None = None
        self._next = 0

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
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
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
        event = await read_input(self._decoder, value, self.partition, offset)
        if event is not None:
            for leg in tuple(self._legs.get(event.request_id, ())):
                leg.call.feed(leg, event, self.partition.partition, offset)


async def read_input(
    decoder: EventDecoder, value: bytes | None, partition: TopicPartition, offset: int
) -> Input | None:
    """The event of a stream in a record of a `tokens` topic, or None for any other; what can't be read is logged and counted."""
    try:
        event = await decoder.decode(value)
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
    return event if isinstance(event, _INPUTS) else None
