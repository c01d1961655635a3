"""Reads topics for people: positions to start from, and records decoded with their place in the log."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schemas.codec import to_json
from schemas.errors import HeadraceError, Undecodable
from schemas.events import Event, PayloadStored
from schemas.payloads import outline_of
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer
    from aiokafka.structs import ConsumerRecord, TopicPartition

    from infra.log import EventDecoder
    from infra.settings import KafkaSettings

POLL_MS = 200
POLL_RECORDS_MAX = 2_000
UNDECODABLE_SHOWN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Read:
    """One record as read. `event` is None if it is no event, and `problem` says why.

    Of one whose content is in the object store `event` is what the record tells, and `stored` says where the rest is.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    headers: dict[str, str]
    value: bytes | None
    event: Event | None
    problem: str | None = None
    stored: PayloadStored | None = None

    @property
    def name(self) -> str:
        """The event's name."""
        return type(self.event).__name__ if self.event is not None else "undecodable"

    def as_json(self) -> dict[str, Any]:
        """What a script reads; bytes that are no text are base64."""
        out: dict[str, Any] = {
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "timestamp_ms": self.timestamp_ms,
            "key": _text(self.key),
            "headers": self.headers,
        }
        if self.stored is not None:
            out["stored"] = {"digest": self.stored.digest, "size_bytes": self.stored.size_bytes}
        if self.event is not None:
            return out | {"event": plain(to_json(self.event))}
        return out | {
            "undecodable": self.problem,
            "value": None if self.value is None else base64.b64encode(self.value).decode(),
        }


def plain(value: Any) -> Any:
    """A value with bytes as text, or as base64 where they are none, so that JSON can hold it."""
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _text(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


async def partitions_of(consumer: AIOKafkaConsumer, topics: Iterable[str]) -> list[TopicPartition]:
    """Every partition of the topics. Raises HeadraceError (not_found) naming a topic that doesn't exist."""
    from aiokafka.structs import TopicPartition

    from infra.kafka import partitions_of as numbers

    known = await consumer.topics()
    found = []
    for topic in topics:
        if topic not in known:
            near = ", ".join(sorted(name for name in known if not name.startswith("__"))) or "none"
            raise HeadraceError(Reason.NOT_FOUND, f"there is no topic {topic!r}; there are: {near}")
        found += [TopicPartition(topic, number) for number in await numbers(consumer, topic)]
    return found


async def seek(consumer: AIOKafkaConsumer, partitions: list[TopicPartition], start: str) -> dict[TopicPartition, int]:
    """Assigns and moves to `beginning`, `end`, or `-N`: N records before the end of each partition. Returns the end offsets."""
    consumer.assign(partitions)
    ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
    begins = await consumer.beginning_offsets(partitions)
    for partition in partitions:
        if start == "beginning":
            offset = begins[partition]
        else:
            back = 0 if start == "end" else int(start.lstrip("-"))
            offset = max(begins[partition], ends[partition] - back)
        consumer.seek(partition, offset)
    return ends


async def read(record: ConsumerRecord[bytes, bytes], decoder: EventDecoder) -> Read:
    """A record with its event. The authorisation header is left out: it is a secret."""
    event: Event | None = None
    problem: str | None = None
    stored: PayloadStored | None = None
    try:
        event = await decoder.decode(record.value)
        if isinstance(event, PayloadStored) and (outline := outline_of(event, decoder.codec)) is not None:
            stored, event = event, outline
    except Undecodable as error:
        problem = error.message
    headers = {name: _text(value) or "" for name, value in record.headers if name != GRANT_HEADER}
    place = (record.topic, record.partition, record.offset, record.timestamp)
    return Read(*place, record.key, headers, record.value, event, problem, stored)


async def follow(
    settings: KafkaSettings, topic: str, *, start: str, limit: int | None, forever: bool
) -> AsyncIterator[Read]:
    """A topic's records from a start on: up to `limit`, and up to the end as it was at the start unless `forever`."""
    from infra.kafka import make_consumer
    from infra.log import EventDecoder

    consumer = make_consumer(settings)
    decoder = EventDecoder(settings)
    try:
        await consumer.start()
        partitions = await partitions_of(consumer, [topic])
        ends = await seek(consumer, partitions, start)
        left = limit
        while forever or await _before(consumer, ends):
            batch = await consumer.getmany(timeout_ms=POLL_MS, max_records=POLL_RECORDS_MAX)
            records = sorted(
                (r for some in batch.values() for r in some), key=lambda r: (r.timestamp, r.partition, r.offset)
            )
            for record in records:
                if not forever and record.offset >= ends[_partition_of(record)]:
                    continue
                yield await read(record, decoder)
                if left is not None:
                    left -= 1
                    if left <= 0:
                        return
    finally:
        await consumer.stop()


def _partition_of(record: ConsumerRecord[bytes, bytes]) -> TopicPartition:
    from aiokafka.structs import TopicPartition

    return TopicPartition(record.topic, record.partition)


async def _before(consumer: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> bool:
    """Whether some partition has records left before its end."""
    return any([await consumer.position(partition) < end for partition, end in ends.items()])


def shown(record: Read) -> str:
    """A record's event as one line without its name: what it says, shortened; what is undecodable, with the reason."""
    if record.event is None:
        raw = "null" if record.value is None else repr(record.value[:UNDECODABLE_SHOWN_BYTES])
        return f"{record.problem}: {raw}"
    parts = {
        name: value
        for name, value in plain(to_json(record.event)).items()
        if name != "type" and value not in (None, [], {}, "")
    }
    said = " ".join(f"{name}={_short(value)}" for name, value in parts.items())
    return said if record.stored is None else f"{said} (+ {record.stored.size_bytes} bytes in the object store)"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"
