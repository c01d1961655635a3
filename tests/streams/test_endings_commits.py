"""Offsets that the group doesn't take: endings say so, and go on."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError
from structlog.testing import capture_logs

from infra.settings import EndingsSettings
from schemas.topics import HOUR_MS, TOKENS
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
