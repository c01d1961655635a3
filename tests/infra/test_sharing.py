"""A group's leader shares the topics, too, that its broker doesn't name for a while after it has started."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.cluster import ClusterMetadata
from aiokafka.consumer.group_coordinator import GroupCoordinator

from infra import sharing
from infra.kafka import make_consumer
from infra.objections import objection
from infra.settings import KafkaSettings
from schemas.topics import LIFECYCLE, TOKENS

HEALED_S_MAX = 30.0


async def until_assigned(consumer: AIOKafkaConsumer, topics: set[str]) -> None:
    async with asyncio.timeout(HEALED_S_MAX):
        while {tp.topic for tp in consumer.assignment()} != topics:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("wait_s", [sharing.MISSING_WAIT_S, 0.0], ids=["while it shares", "after it has shared"])
async def test_a_topic_that_is_forgotten_for_a_while_is_shared(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setattr(sharing, "MISSING_WAIT_S", wait_s)
    update, shared = ClusterMetadata.update_metadata, GroupCoordinator._perform_assignment
    forgotten, shares = False, 0

    def forgetful(self: ClusterMetadata, metadata: Any) -> None:
        if forgotten:
            metadata.topics[:] = [each for each in metadata.topics if each[1] != TOKENS]
        update(self, metadata)

    async def counted(self: GroupCoordinator, response: Any) -> Any:
        nonlocal forgotten, shares
        forgotten, shares = shares == 0, shares + 1
        if forgotten:
            await self._client.force_metadata_update()
            asyncio.get_running_loop().call_later(1.5, remember)
        return await shared(self, response)

    def remember() -> None:
        nonlocal forgotten
        forgotten = False

    monkeypatch.setattr(ClusterMetadata, "update_metadata", forgetful)
    monkeypatch.setattr(GroupCoordinator, "_perform_assignment", counted)
    consumer = make_consumer(kafka, TOKENS, LIFECYCLE, group=f"forgetful-{uuid4().hex}", metadata_max_age_ms=300_000)
    await consumer.start()
    try:
        await until_assigned(consumer, {TOKENS, LIFECYCLE})
        assert shares == (1 if wait_s else 2)
    finally:
        await consumer.stop()


async def test_a_topic_that_does_not_exist_holds_up_nobody_for_long_and_its_leader_says_so(
    kafka: KafkaSettings,
) -> None:
    begun_s, missing = time.monotonic(), f"never-{uuid4().hex}"
    consumer = make_consumer(kafka, group=f"hopeful-{uuid4().hex}")
    await consumer.start()
    try:
        consumer.subscribe([TOKENS, missing])
        await until_assigned(consumer, {TOKENS})
        assert time.monotonic() - begun_s > sharing.MISSING_WAIT_S
        assert missing in (objection() or "")
    finally:
        await consumer.stop()
    async with asyncio.timeout(HEALED_S_MAX):
        while missing in (objection() or ""):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
