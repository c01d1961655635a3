"""Where a consumer stands in its partitions, and where a time begins in them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition


def handed_out(consumer: AIOKafkaConsumer) -> dict[TopicPartition, int]:
    """Of each assigned partition that has a position, the offset below which the consumer has handed out whatever can be read there.

    What no client can read (`infra.foreign_names`), and what is no record, such as a transaction's marker, is never handed out: who commits by
    the records alone never commits past it, and the group's lag stays above zero until the next record. Doesn't wait; who asks right after it has
    taken what it was given, without a pause, may commit below these.
    """
    subscription = consumer._subscription.subscription  # noqa: SLF001 - aiokafka's own `position` waits
    assignment = None if subscription is None else subscription.assignment
    if assignment is None:
        return {}
    states = {place: assignment.state_value(place) for place in assignment.tps}
    return {place: state.position for place, state in states.items() if state.has_valid_position}


class Since(NamedTuple):
    """Of a partition: the offset of the first record of a time or later, which is the end if there is none, and the end."""

    start: int
    end: int


async def since(
    consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition], time_ms: int
) -> dict[TopicPartition, Since]:
    """Where this time begins in each partition. What is written meanwhile isn't before `start`: the ends are asked for first. Raises KafkaError."""
    if not partitions:
        return {}
    ends = await consumer.end_offsets(list(partitions))
    found = await consumer.offsets_for_times(dict.fromkeys(partitions, time_ms))
    starts = {place: end if found.get(place) is None else min(found[place].offset, end) for place, end in ends.items()}
    return {place: Since(starts[place], end) for place, end in ends.items()}
