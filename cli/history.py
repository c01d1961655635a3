"""Reads everything the log holds of one request, from the time in its id up to its ending."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cli.records import POLL_MS, POLL_RECORDS_MAX, Read, partitions_of, read
from schemas.errors import HeadraceError
from schemas.events import InferenceAdmitted, InferenceCompleted, InferenceFailed, InferenceJoined, InferenceRejected
from schemas.ids import is_request_id, unix_ms
from schemas.reasons import Reason
from schemas.topics import ANSWERS, CONTROL, DEAD_LETTERS, LIFECYCLE, MINUTE_MS, TOKENS_PATTERN

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer
    from aiokafka.structs import ConsumerRecord, TopicPartition

    from infra.log import EventDecoder
    from infra.settings import KafkaSettings

CLOCK_MARGIN_MS = 2 * MINUTE_MS
"""How far the clock that made an id may be ahead of the broker's."""
AFTER_ENDING_MS = 10_000
"""How long after its ending more may be written of a request: its answer, and what former owners still send."""
AFTER_REFUSAL_MS = MINUTE_MS
"""The same after a refusal, which may be a former owner's."""
FOUND_MAX = 200_000
FETCH_TIMEOUT_S = 60.0
_TOPIC = re.compile(rf"requests\.\w+|work\..+|{TOKENS_PATTERN[1:-1]}|{LIFECYCLE}|{ANSWERS}|{CONTROL}|{DEAD_LETTERS}")
_OPENAI_PREFIX = re.compile(r"^[a-z_]+-(?=[0-9a-f]{8}-)")


def request_id_of(text: str) -> str:
    """The request id in what a caller has: the id itself, or a completion's id, such as `chatcmpl-…`.

    Raises HeadraceError (invalid_request) if it is none.
    """
    found = _OPENAI_PREFIX.sub("", text.strip().lower())
    if not is_request_id(found):
        raise HeadraceError(
            Reason.INVALID_REQUEST,
            f"{text!r} is no request id: it is a UUIDv7, as in the header x-request-id or after `chatcmpl-`",
        )
    return found


async def history(settings: KafkaSettings, request_id: str, *, everything: bool = False) -> list[Read]:
    """A request's records in the order of their timestamps.

    Reads from the time in the id, less a margin, up to the end as it is now, and no further than shortly after the request's ending.
    With `everything`, from the beginning and to the end: for an id whose maker's clock was wrong. Raises HeadraceError (unavailable) if
    that takes longer than `FETCH_TIMEOUT_S`, and (answer_too_large) for more than `FOUND_MAX` records.
    """
    from infra.kafka import make_consumer
    from infra.log import EventDecoder

    consumer, decoder = make_consumer(settings), EventDecoder(settings)
    try:
        await consumer.start()
        ends = await _start_at(consumer, 0 if everything else max(0, unix_ms(request_id) - CLOCK_MARGIN_MS))
        found = await asyncio.wait_for(
            _read_all(consumer, decoder, request_id, ends, everything=everything), FETCH_TIMEOUT_S
        )
    except TimeoutError:
        raise HeadraceError(
            Reason.UNAVAILABLE, f"the log was not read to its end within {FETCH_TIMEOUT_S:.0f} s; try again"
        ) from None
    finally:
        await consumer.stop()
    return sorted(found, key=lambda item: (item.timestamp_ms, _rank(item), item.topic, item.partition, item.offset))


async def _start_at(consumer: AIOKafkaConsumer, from_ms: int) -> dict[TopicPartition, int]:
    """Assigns the partitions that have records from a time on, each at the first of them. Returns their ends."""
    names = [name for name in await consumer.topics() if _TOPIC.fullmatch(name)]
    partitions = await partitions_of(consumer, names)
    if not partitions:
        return {}
    ends = await consumer.end_offsets(partitions)
    starts = await consumer.offsets_for_times(dict.fromkeys(partitions, from_ms))
    wanted = {p: start.offset for p, start in starts.items() if start is not None and start.offset < ends[p]}
    consumer.assign(list(wanted))
    for partition, offset in wanted.items():
        consumer.seek(partition, offset)
    return {partition: ends[partition] for partition in wanted}


async def _read_all(
    consumer: AIOKafkaConsumer,
    decoder: EventDecoder,
    request_id: str,
    ends: dict[TopicPartition, int],
    *,
    everything: bool,
) -> list[Read]:
    mark = request_id.encode()
    found: list[Read] = []
    last_ms: int | None = None
    left = dict(ends)
    while left:
        batches = await consumer.getmany(*left, timeout_ms=POLL_MS, max_records=POLL_RECORDS_MAX)
        for partition, records in batches.items():
            for record in records:
                if record.offset < ends[partition] and _mentions(record, mark):
                    item = await read(record, decoder)
                    if getattr(item.event, "request_id", request_id) != request_id:
                        continue  # another request's, whose text speaks of this one
                    found.append(item)
                    if item.topic == LIFECYCLE:
                        last_ms = over_ms(found)
            past = records[-1].offset + 1 >= ends[partition]
            if past or (not everything and last_ms is not None and records[-1].timestamp > last_ms):
                left.pop(partition, None)
                consumer.pause(partition)
        if not batches:  # positions move over gaps, such as compaction's, without records
            left = {p: end for p, end in left.items() if await consumer.position(p) < end}
        if len(found) > FOUND_MAX:
            raise HeadraceError(Reason.ANSWER_TOO_LARGE, f"the log holds more than {FOUND_MAX} records of this request")
    return found


def over_ms(found: Iterable[Read]) -> int | None:
    """Until when there may be more records of a request, by what `lifecycle` has told of it; None while nothing there says that it is over.

    A refusal may be a late one: another admission has let the request in, or does so soon.
    """
    ended, refused, let_in = list[int](), list[int](), False
    for item in found:
        match item.event if item.topic == LIFECYCLE else None:
            case InferenceCompleted() | InferenceFailed() | InferenceJoined():
                ended.append(item.timestamp_ms)
            case InferenceRejected():
                refused.append(item.timestamp_ms)
            case InferenceAdmitted():
                let_in = True
    if ended:
        return max(ended) + AFTER_ENDING_MS
    return None if let_in or not refused else max(refused) + AFTER_REFUSAL_MS


def _mentions(record: ConsumerRecord[bytes, bytes], mark: bytes) -> bool:
    """Whether a record is about the request: Avro and JSON both hold its id as plain text. Spares decoding all others."""
    return mark in (record.value or b"") or mark == record.key


_ORDER = (
    "InferenceRequested",
    "InferenceAdmitted",
    "InferenceJoined",
    "InferenceScheduled",
    "GenerationTakenOver",
    "GenerationStarted",
    "InferenceStarted",
    "TokensGenerated",
    "GenerationReleased",
    "InferenceCancelled",
    "InferenceRejected",
    "InferenceCompleted",
    "InferenceFailed",
    "InferenceAnswered",
)


def _rank(item: Read) -> tuple[int, bool]:
    """Orders records of one millisecond as cause and effect."""
    place = _ORDER.index(item.name) if item.name in _ORDER else len(_ORDER)
    return place, item.topic == LIFECYCLE
