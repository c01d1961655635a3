"""Finds one request in the log, and reads a stream from a place in it until it has caught up with those who follow its partition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.partitioner import DefaultPartitioner

from bridge.calls import Leg
from bridge.errors import unreachable
from bridge.streams import Dispatcher, read_input
from infra.kafka import partitions_of
from infra.log import EventDecoder
from schemas.errors import HeadraceError, Undecodable
from schemas.events import Event, InferenceAdmitted, InferenceAnswered, InferenceRejected
from schemas.ids import unix_ms
from schemas.reasons import Reason
from schemas.topics import ANSWERS, HOUR_MS, LIFECYCLE, MINUTE_MS

POLL_MS = 500
RECORDS_MAX = 1_000
CLOCK_MARGIN_MS = 2 * MINUTE_MS
"""How far the clock that made a request's id may be from the broker's."""
SKEW_MS = 10_000
"""How far the clocks of two brokers may be apart."""
ADMITTED_WITHIN_MS = 10 * MINUTE_MS
"""How long after its id was made a request is looked for in `lifecycle`."""
ANSWERED_WITHIN_MS = 3 * HOUR_MS
"""How long after its id was made a request's answer is looked for: more than a request may take."""
SCAN_MAX_S = 20.0
"""How long one search of the log may take; then the caller may try again."""
YOUNG_S = 5.0
"""A request whose id is no older than this may be on its way: it is waited for,"""
YOUNG_WAIT_S = 2.0
"""so long."""
SHORT_WAIT_S = 5.0
"""How long a log that ends before a place that was read once may take to be whole: a broker that starts anew shows all of it after a while."""
SHORT_POLL_S = 0.2

_partition_of = DefaultPartitioner()


class Gone(Exception):
    """The records from the place on are no longer in the partition. Never leaves this room."""


async def verdict(
    consumer: AIOKafkaConsumer, decoder: EventDecoder, request_id: str, tenant: str
) -> InferenceAdmitted | InferenceRejected | None:
    """What admission decided of a tenant's request, or None if `lifecycle` knows of none. Raises HeadraceError (unavailable)."""
    young = abs(time.time() - unix_ms(request_id) / 1000) < YOUNG_S
    search = _Search(LIFECYCLE, tenant, request_id, ADMITTED_WITHIN_MS, YOUNG_WAIT_S if young else 0.0)
    kinds = (InferenceAdmitted, InferenceRejected)
    found = await _find(consumer, decoder, search, lambda event: isinstance(event, kinds) and event.tenant == tenant)
    return cast(InferenceAdmitted | InferenceRejected | None, found)


async def answer(
    consumer: AIOKafkaConsumer, decoder: EventDecoder, request_id: str, tenant: str
) -> InferenceAnswered | None:
    """A tenant's whole answer, or None if `answers` has none. Raises HeadraceError (unavailable)."""
    search = _Search(ANSWERS, request_id, request_id, ANSWERED_WITHIN_MS)
    found = await _find(
        consumer, decoder, search, lambda event: isinstance(event, InferenceAnswered) and event.tenant == tenant
    )
    return cast(InferenceAnswered | None, found)


@dataclass(frozen=True, slots=True)
class _Search:
    """Where a request is looked for: in the partition of a key, for so long after its id was made, and `wait_s` past the present end."""

    topic: str
    key: str
    request_id: str
    within_ms: int
    wait_s: float = 0.0


async def _find(
    consumer: AIOKafkaConsumer, decoder: EventDecoder, search: _Search, wanted: Callable[[Event], bool]
) -> Event | None:
    numbers = await _numbers(consumer, search.topic)
    if not numbers:
        raise HeadraceError(Reason.UNAVAILABLE, f"the topic {search.topic} doesn't exist; run `headrace topics ensure`")
    partition = TopicPartition(search.topic, _partition_of(search.key.encode(), numbers, numbers))
    made_ms = unix_ms(search.request_id)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    end = (await consumer.end_offsets([partition]))[partition]
    await seek_to_time(consumer, partition, max(0, made_ms - CLOCK_MARGIN_MS))
    while await consumer.position(partition) < end or loop.time() < began_s + search.wait_s:
        if loop.time() > began_s + SCAN_MAX_S:
            raise HeadraceError(Reason.UNAVAILABLE, "the log wasn't searched in time; try again", retry_after_ms=1000)
        for record in await _poll(consumer, partition):
            if record.timestamp > made_ms + search.within_ms:
                return None
            event = await _about(decoder, record, search.request_id)
            if event is not None and wanted(event):
                return event
    return None


async def _numbers(consumer: AIOKafkaConsumer, topic: str) -> list[int]:
    """A topic's partitions, whatever the consumer read before: with nothing assigned it learns of all topics."""
    if not consumer.partitions_for_topic(topic):
        consumer.unsubscribe()
    return await partitions_of(consumer, topic)


async def _about(decoder: EventDecoder, record: ConsumerRecord, request_id: str) -> Event | None:
    """The record's event if it is about the request: both encodings hold its id as plain text, which spares decoding all others."""
    if not record.value or request_id.encode() not in record.value:
        return None
    try:
        event = await decoder.decode(record.value)
    except Undecodable:
        return None
    return event if getattr(event, "request_id", None) == request_id else None


async def seek_to_time(consumer: AIOKafkaConsumer, partition: TopicPartition, from_ms: int) -> bool:
    """Read this partition from a time on. False if what was written then may be gone."""
    consumer.assign([partition])
    begin = (await consumer.beginning_offsets([partition]))[partition]
    end = (await consumer.end_offsets([partition]))[partition]
    found = (await consumer.offsets_for_times({partition: from_ms}))[partition]
    start = end if found is None else found.offset  # nothing from that time on was there when `end` was
    consumer.seek(partition, start)
    return bool(begin == 0 or begin < start)


async def seek_to_offset(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> None:
    """Read this partition from an offset on. Raises Gone; HeadraceError (not_found) if the log doesn't reach so far."""
    if partition.partition not in await _numbers(consumer, partition.topic):
        raise HeadraceError(Reason.NOT_FOUND, "there is no such stream")
    consumer.assign([partition])
    if offset < (await consumer.beginning_offsets([partition]))[partition]:
        raise Gone
    loop = asyncio.get_running_loop()
    until_s = loop.time() + SHORT_WAIT_S
    while offset > (await consumer.end_offsets([partition]))[partition]:
        if loop.time() > until_s:
            raise HeadraceError(Reason.NOT_FOUND, "there is no such stream")
        await asyncio.sleep(SHORT_POLL_S)
    consumer.seek(partition, offset)


async def catch_up(consumer: AIOKafkaConsumer, decoder: EventDecoder, leg: Leg, follower: Dispatcher) -> None:
    """Feed a leg from where the consumer stands up to where the follower stands, then let the follower feed it.

    Neither misses a record in between: that the reader has got so far and that the leg is registered is one step of the event loop.
    Ends with the call, whose deadline bounds it.
    """
    partition, mark = follower.partition, leg.request_id.encode()
    while True:
        if leg.call.done:
            return
        if follower.ended:
            raise unreachable()
        position = await consumer.position(partition)
        if position >= follower.position:
            follower.register(leg)
            return
        for record in await _poll(consumer, partition):
            if record.value and mark in record.value:
                event = await read_input(decoder, record.value, partition, record.offset)
                if event is not None and event.request_id == leg.request_id:
                    await leg.call.room()
                    leg.call.feed(leg, event, partition.partition, record.offset)


async def _poll(consumer: AIOKafkaConsumer, partition: TopicPartition) -> list[ConsumerRecord]:
    batches = await consumer.getmany(partition, timeout_ms=POLL_MS, max_records=RECORDS_MAX)
    records: list[ConsumerRecord] = batches.get(partition, [])
    return records
