"""Finds one request in the log, and places in its partitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.partitioner import DefaultPartitioner

from decisions.accounts import is_void
from infra.kafka import partitions_of
from infra.log import EventDecoder
from schemas.errors import HeadraceError, Undecodable
from schemas.events import (
    Event,
    InferenceAdmitted,
    InferenceAnswered,
    InferenceJoined,
    InferenceRejected,
    InferenceRequested,
    PayloadStored,
    Reply,
)
from schemas.ids import unix_ms
from schemas.payloads import outline_of
from schemas.reasons import Reason
from schemas.topics import ANSWERS, HOUR_MS, LIFECYCLE, MINUTE_MS, requests_topic

POLL_MS = 500
RECORDS_MAX = 1_000
CLOCK_MARGIN_MS = 2 * MINUTE_MS
"""How far the clock that made a request's id may be from the broker's."""
SKEW_MS = 10_000
"""How far the clocks of two brokers may be apart."""
ADMITTED_WITHIN_MS = 10 * MINUTE_MS
"""How long after its id was made a request is looked for in `lifecycle`, and in `requests.*`."""
ANSWERED_WITHIN_MS = 3 * HOUR_MS
"""How long after its id was made a request's answer is looked for: more than a request may take."""
SCAN_MAX_S = 20.0
"""How long one search of the log may take; then the caller may try again."""
LATE_MS = MINUTE_MS
"""So long after a refusal it is looked whether another admission has let the request in: of two owners of its partition one was late."""
YOUNG_S = 5.0
"""A request whose id is no older than this may be on its way: it is waited for,"""
YOUNG_WAIT_S = 2.0
"""so long."""

ReplyOf = Callable[[str, Sequence[tuple[str, bytes]]], Reply | None]
"""Where the answer to a record goes, by the grant in its headers, if that is a tenant's."""
Wanted = Callable[[ConsumerRecord, Event], bool]

_partition_of = DefaultPartitioner()


async def verdict(
    consumer: AIOKafkaConsumer, decoder: EventDecoder, request_id: str, tenant: str
) -> InferenceAdmitted | InferenceJoined | InferenceRejected | None:
    """What admission decided of a tenant's request, or None if `lifecycle` knows of none. Raises HeadraceError (unavailable).

    Of two decisions it is the admission, also if a refusal was told before it: what becomes of that is told by the stream (ADR 14).
    """
    young = abs(time.time() - unix_ms(request_id) / 1000) < YOUNG_S
    search = _Search(LIFECYCLE, tenant, request_id, tenant, ADMITTED_WITHIN_MS, YOUNG_WAIT_S if young else 0.0)
    kinds: tuple[type[InferenceAdmitted | InferenceJoined | InferenceRejected], ...]
    kinds = (InferenceAdmitted, InferenceJoined, InferenceRejected)

    def wanted(record: ConsumerRecord, event: Event) -> bool:
        void = isinstance(event, InferenceAdmitted) and is_void(event, record.timestamp)
        return isinstance(event, kinds) and event.tenant == tenant and not void

    found = await _find(consumer, decoder, search, wanted)
    if found is not None and isinstance(found[1], InferenceRejected):
        after = replace(search, within_ms=found[0].timestamp + LATE_MS - unix_ms(request_id), wait_s=0.0)
        kinds = (InferenceAdmitted,)
        found = await _find(consumer, decoder, after, wanted) or found
    return cast(InferenceAdmitted | InferenceJoined | InferenceRejected, found[1]) if found is not None else None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its own record tells of it: where its answer goes, its tier and model, and when it was written."""

    reply: Reply
    tier: str
    model: str
    asked_ms: int


async def asked(
    consumer: AIOKafkaConsumer, decoder: EventDecoder, request_id: str, tenant: str, tier: str, reply_of: ReplyOf
) -> Asked | None:
    """What a tenant asked on a tier under this id; None if there is no such record. Raises HeadraceError (unavailable)."""
    search = _Search(requests_topic(tier), tenant, request_id, tenant, ADMITTED_WITHIN_MS, follows=False)
    kinds = (InferenceRequested, PayloadStored)

    def wanted(record: ConsumerRecord, event: Event) -> bool:
        return isinstance(event, kinds) and reply_of(tenant, record.headers) is not None

    found = await _find(consumer, decoder, search, wanted)
    if found is None or (reply := reply_of(tenant, found[0].headers)) is None:
        return None
    record, event = found
    request = outline_of(event) if isinstance(event, PayloadStored) else event
    return Asked(reply, tier, request.model if isinstance(request, InferenceRequested) else "", record.timestamp)


async def answer(
    consumer: AIOKafkaConsumer, decoder: EventDecoder, request_id: str, tenant: str
) -> InferenceAnswered | None:
    """A tenant's whole answer, or None if `answers` has none. Raises HeadraceError (unavailable)."""
    search = _Search(ANSWERS, request_id, request_id, tenant, ANSWERED_WITHIN_MS)
    found = await _find(
        consumer, decoder, search, lambda _, event: isinstance(event, InferenceAnswered) and event.tenant == tenant
    )
    return cast(InferenceAnswered, found[1]) if found is not None else None


@dataclass(frozen=True, slots=True)
class _Search:
    """Where a request is looked for: in the partition of a key, for so long after its id was made, and `wait_s` past the present end.

    With `follows` what is in the object store is fetched.
    """

    topic: str
    key: str
    request_id: str
    tenant: str
    within_ms: int
    wait_s: float = 0.0
    follows: bool = True


async def _find(
    consumer: AIOKafkaConsumer, decoder: EventDecoder, search: _Search, wanted: Wanted
) -> tuple[ConsumerRecord, Event] | None:
    numbers = await _numbers(consumer, search.topic)
    if not numbers:
        raise HeadraceError(Reason.UNAVAILABLE, f"the topic {search.topic} doesn't exist; run `headrace topics ensure`")
    partition = TopicPartition(search.topic, _partition_of(search.key.encode(), numbers, numbers))
    made_ms = unix_ms(search.request_id)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    end = (await consumer.end_offsets([partition]))[partition]
    start, _ = await offset_at(consumer, partition, max(0, made_ms - CLOCK_MARGIN_MS))
    consumer.assign([partition])
    consumer.seek(partition, start)
    while await consumer.position(partition) < end or loop.time() < began_s + search.wait_s:
        if loop.time() > began_s + SCAN_MAX_S:
            raise HeadraceError(Reason.UNAVAILABLE, "the log wasn't searched in time; try again", retry_after_ms=1000)
        for record in await poll(consumer, partition):
            if record.timestamp > made_ms + search.within_ms:
                return None
            event = await _about(decoder, record, search)
            if event is not None and wanted(record, event):
                return record, event
    return None


async def _numbers(consumer: AIOKafkaConsumer, topic: str) -> list[int]:
    """A topic's partitions, whatever the consumer read before: with nothing assigned it learns of all topics."""
    if not consumer.partitions_for_topic(topic):
        consumer.assign([])
    return await partitions_of(consumer, topic)


async def _about(decoder: EventDecoder, record: ConsumerRecord, search: _Search) -> Event | None:
    """The record's event if it is about the request: both encodings hold its id as plain text, which spares decoding all others."""
    request_id, tenant = search.request_id, search.tenant
    if not record.value or request_id.encode() not in record.value:
        return None
    try:
        event = await decoder.decode_record(record.value)
        if not (isinstance(event, PayloadStored) and search.follows):
            return event if getattr(event, "request_id", None) == request_id else None
        # Another tenant's isn't fetched.
        return await decoder.decode(record.value) if (event.request_id, event.tenant) == (request_id, tenant) else None
    except Undecodable:
        return None


async def offset_at(consumer: AIOKafkaConsumer, partition: TopicPartition, from_ms: int) -> tuple[int, bool]:
    """The offset from which on all of a time and later is read, and whether that is whole: what was written then may be gone."""
    await _numbers(consumer, partition.topic)
    begin = (await consumer.beginning_offsets([partition]))[partition]
    end = (await consumer.end_offsets([partition]))[partition]
    found = (await consumer.offsets_for_times({partition: from_ms}))[partition]
    start = end if found is None else found.offset  # nothing from that time on was there when `end` was
    return start, bool(begin == 0 or begin < start)


async def span(consumer: AIOKafkaConsumer, partition: TopicPartition) -> tuple[int, int] | None:
    """The partition's first offset and its end; None if there is no such partition."""
    if partition.partition not in await _numbers(consumer, partition.topic):
        return None
    begin = (await consumer.beginning_offsets([partition]))[partition]
    end = (await consumer.end_offsets([partition]))[partition]
    return int(begin), int(end)


async def poll(consumer: AIOKafkaConsumer, partition: TopicPartition) -> list[ConsumerRecord]:
    """The next records of an assigned partition; none if none come for a while. Raises KafkaError."""
    batches = await consumer.getmany(partition, timeout_ms=POLL_MS, max_records=RECORDS_MAX)
    records: list[ConsumerRecord] = batches.get(partition, [])
    return records
