"""A client that waits for its broker doesn't spin."""

from __future__ import annotations

import asyncio
import contextlib

from aiokafka.client import AIOKafkaClient

from infra.broker import EmbeddedKafka
from infra.kafka import connection
from infra.pacing import FAILED_UPDATE_WAIT_S

SPAN_S = 1.0


async def test_updates_that_fail_at_once_are_not_repeated_at_once(spare_broker: EmbeddedKafka):
    client = AIOKafkaClient(**connection(spare_broker.settings))
    await client.bootstrap()
    failed = 0
    try:
        await asyncio.to_thread(spare_broker.kill)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SPAN_S):
                while not await client.force_metadata_update():
                    failed += 1
        assert 0 < failed <= SPAN_S / FAILED_UPDATE_WAIT_S
        await asyncio.to_thread(spare_broker.start)
        assert await client.force_metadata_update()
    finally:
        await client.close()
