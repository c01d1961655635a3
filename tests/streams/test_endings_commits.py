"""Offsets that the group doesn't take, and partitions that it takes away again: endings say so, and go on."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError
from structlog.testing import capture_logs

from infra.settings import EndingsSettings
from schemas.topics import HOUR_MS, TOKENS
from streams.deadlines import Deadlines
from streams.endings import GROUP, Endings
from streams.fold_table import FoldTable

OFFSETS = {TopicPartition(TOKENS, 3): 9, TopicPartition(f"{TOKENS}.acme", 0): 5}


def endings_of(consumer: AIOKafkaConsumer) -> Endings:
    """Endings that have passed so many records of each partition, and owe nobody a word."""
    unused: Any = None
    endings = Endings(EndingsSettings(), consumer, unused, unused)
    for partition, offset in OFFSETS.items():
        endings._tables[partition] = FoldTable(partition.topic, partition.partition, 0, HOUR_MS)
        endings._tables[partition].skip(offset - 1)
    return endings


@pytest.mark.parametrize("error", ["CommitFailedError", "IllegalStateError"])
async def test_a_commit_that_comes_too_late_is_told_and_is_due_still(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = AIOKafkaConsumer(group_id=GROUP)  # has no partitions, so it refuses by itself
    tried: list[dict[TopicPartition, int]] = []
    commit = consumer.commit

    async def refuse(offsets: dict[TopicPartition, int]) -> None:
        tried.append(offsets)
        if error == "CommitFailedError":  # which only a broker says
            raise CommitFailedError
        await commit(offsets)

    monkeypatch.setattr(consumer, "commit", refuse)
    endings = endings_of(consumer)
    with capture_logs() as lines:
        await endings.commit()
        await endings.commit()
    await consumer.stop()
    assert tried == [OFFSETS, OFFSETS]
    assert [(line["log_level"], line["partitions"], line["error"]) for line in lines] == [
        ("warning", ["tokens:3", "tokens.acme:0"], error)
    ] * 2


async def test_partitions_that_go_while_they_are_begun_are_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new tenant's topic changes what is subscribed to, and with it takes away what was just assigned."""
    consumer = AIOKafkaConsumer(group_id=GROUP)  # has no partitions, so it refuses to seek by itself

    async def nothing(*_: Any) -> dict[TopicPartition, Any]:
        return dict.fromkeys(OFFSETS, None)

    async def first(*_: Any) -> dict[TopicPartition, int]:
        return dict.fromkeys(OFFSETS, 0)

    async def committed(partition: TopicPartition) -> int:
        return OFFSETS[partition]

    for name, does in (
        ("offsets_for_times", nothing), ("beginning_offsets", first), ("end_offsets", first), ("committed", committed),
    ):  # fmt: skip
        monkeypatch.setattr(consumer, name, does)
    unused: Any = None
    endings = Endings(EndingsSettings(), consumer, unused, unused)
    deadlines = Deadlines(consumer, unused, unused)
    with capture_logs() as lines:
        await endings.on_partitions_assigned(OFFSETS)
        await deadlines.on_partitions_assigned(OFFSETS)
    await consumer.stop()
    assert [line["event"] for line in lines] == ["partitions are gone before they were begun"] * 2
    assert not endings.writes.failed.done() and not deadlines.words.failed.done()
    assert not endings.assigned and not endings._tables
