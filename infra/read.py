"""Reads a topic from where one left off to its present end, and stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from infra.kafka import make_consumer, partitions_of, stop_consumer
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.reasons import Reason

READ_STALL_S = 30.0
POLL_MS = 500

Positions = dict[TopicPartition, int]


async def assign_all(
    consumer: AIOKafkaConsumer, topic: str, start: Positions | None = None, only: Collection[int] | None = None
) -> Positions:
    """Assign a started consumer all partitions of a topic, or `only` some, from `start` or their beginning; return the present ends.

    Raises HeadraceError (unavailable) if the topic doesn't exist.
    """
    found = await partitions_of(consumer, topic)
    if not found:
        raise HeadraceError(
            Reason.UNAVAILABLE,
            f"the topic {topic} doesn't exist (run `headrace topics ensure`), or this user may not see it "
            "(`headrace topics acl`)",
        )
    partitions = [TopicPartition(topic, number) for number in found if only is None or number in only]
    consumer.assign(partitions)
    for partition in partitions:
        if start and partition in start:
            consumer.seek(partition, start[partition])
        else:
            await consumer.seek_to_beginning(partition)
    ends: Positions = await consumer.end_offsets(partitions)
    return ends


async def reached(consumer: AIOKafkaConsumer, ends: Positions) -> bool:
    """Whether everything before `ends` was handed out. Positions count, since compaction leaves gaps."""
    for partition, end in ends.items():
        if end > 0 and await consumer.position(partition) < end:
            return False
    return True


async def read_to_end(
    settings: KafkaSettings,
    topic: str,
    positions: Positions | None = None,
    only: Collection[int] | None = None,
    last: int | None = None,
) -> AsyncIterator[ConsumerRecord]:
    """Every record of a topic, or of `only` some of its partitions, up to its end as of now, in order within a partition.

    `positions` says where to start, and is moved on to where the next call should; `last` starts so many offsets before the end. Raises HeadraceError (unavailable)
    if the topic or the cluster can't be reached, or nothing comes for `READ_STALL_S`.
    """
    consumer = make_consumer(settings)
    loop = asyncio.get_running_loop()
    try:
        await consumer.start()
        ends = await assign_all(consumer, topic, positions, only)
        if last is not None:
            begins = await consumer.beginning_offsets(list(ends))
            for partition, end in ends.items():
                consumer.seek(partition, max(begins[partition], end - last))
        limit = loop.time() + READ_STALL_S
        while not await reached(consumer, ends):
            batches = await consumer.getmany(timeout_ms=POLL_MS)
            for partition, records in batches.items():
                for record in records:
                    if record.offset < ends[partition]:
                        yield record
            if batches:
                limit = loop.time() + READ_STALL_S
            elif loop.time() > limit:
                raise HeadraceError(Reason.UNAVAILABLE, f"the topic {topic} can't be read to its end")
        if positions is not None:
            positions.update(ends)
    except (KafkaError, OSError) as error:
        raise HeadraceError(Reason.UNAVAILABLE, f"the topic {topic} can't be read: {error}") from error
    finally:
        await stop_consumer(consumer)
