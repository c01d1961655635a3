"""Sends the records that one input caused, and returns when the broker has confirmed all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from aiokafka.structs import RecordMetadata

from infra.log import EventProducer, Headers, NotDelivered
from schemas.events import Event, InferenceCancelled, InferenceFailed, Reply
from schemas.quick import quick
from schemas.topics import CONTROL

ATTEMPTS_MAX = 5
BACKOFF_S = 0.2

log = structlog.get_logger("streams.outbox")


@quick
@dataclass(frozen=True, slots=True)
class Outgoing:
    """One record to write: the event, where it goes, and how it is written.

    `value` is the event as `EventProducer.encoded` gave it, if it did; `headers` come to those of all that is written with it.
    """

    topic: str
    event: Event
    key: str | None
    partition: int | None = None
    encoding: str = "avro"
    value: bytes | None = None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Together:
    """Records of one partition that stand in the log all together or not at all."""

    topic: str
    events: Sequence[Event]
    key: str
    partition: int
    encoding: str = "avro"


def reply_to(reply: Reply, event: Event, request_id: str) -> Outgoing:
    """A record for the caller's own partition, in the encoding that the grant names."""
    return Outgoing(reply.topic, event, request_id, reply.partition, reply.encoding)


def cut_short(reply: Reply | None, ending: InferenceFailed, word: InferenceCancelled | None) -> list[Outgoing]:
    """What ends an open request from outside: its ending where its stream is, if that is known, and the word to all workers, if they need it."""
    records = [] if reply is None else [reply_to(reply, ending, ending.request_id)]
    if word is not None:
        records.append(Outgoing(CONTROL, word, word.request_id))
    return records


async def deliver(
    producer: EventProducer, records: Sequence[Outgoing | Together], headers: Headers = ()
) -> list[RecordMetadata]:
    """Write all records and wait until the broker has them; their positions, in the same order.

    What isn't confirmed is written again, all of it: readers ignore what they have seen. Raises `NotDelivered` after
    `ATTEMPTS_MAX`, and at once RecordTooLarge or NoSuchPartition of `infra.log`, when some may have been written.
    """
    attempt = 1
    while True:
        try:
            futures = [await _send(producer, record, headers) for record in records]
            return [await future for future in futures]  # each comes to its end by itself: gathering them costs more
        except NotDelivered as error:
            log.warning("not confirmed", attempt=attempt, error=error.message)
            if attempt == ATTEMPTS_MAX:
                raise
            await asyncio.sleep(BACKOFF_S * attempt)
            attempt += 1


async def _send(
    producer: EventProducer, record: Outgoing | Together, headers: Headers
) -> asyncio.Future[RecordMetadata]:
    if isinstance(record, Together):
        return await producer.send_together(
            record.topic,
            record.events,
            key=record.key,
            partition=record.partition,
            headers=headers,
            encoding=record.encoding,
        )
    if record.headers:
        headers = (*headers, *record.headers)
    if record.value is not None:
        key = None if record.key is None else record.key.encode()
        return await producer.send_raw(record.topic, record.value, key, record.partition, headers)
    return await producer.send(
        record.topic,
        record.event,
        key=record.key,
        partition=record.partition,
        headers=headers,
        encoding=record.encoding,
    )
