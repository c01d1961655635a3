"""A caller that has no front door: it writes to the log itself, and hears there what becomes of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from cli.registry import find_key, now_ms, read_tenant
from cli.stack import Stack
from infra.grants import Grant, mint
from infra.kafka import make_consumer, partitions_of
from infra.log import EventDecoder, EventProducer
from infra.settings import grant_secret
from schemas.errors import HeadraceError
from schemas.events import Event, InferenceCancelled, InferenceRequested, Reply
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER, HOUR_MS, INTERACTIVE, LIFECYCLE, TOKENS, requests_topic

POLL_MS = 100
HEARD_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Direct:
    """One tenant's, on the interactive tier. `until` follows `tokens` and `lifecycle` from when it was made."""

    tenant: str
    _headers: tuple[tuple[str, bytes], ...]
    _producer: EventProducer
    _consumer: AIOKafkaConsumer
    _decoder: EventDecoder

    async def send(self, event: InferenceRequested | InferenceCancelled) -> None:
        """Returns when the log has it."""
        topic = requests_topic(INTERACTIVE)
        await self._producer.send_and_wait(topic, event, key=self.tenant, headers=self._headers)

    async def until(self, wanted: Callable[[Event], bool]) -> Event:
        """The next event that is wanted. Raises HeadraceError (unavailable) if none comes."""
        try:
            async with asyncio.timeout(HEARD_S_MAX):
                while True:
                    batches = await self._consumer.getmany(timeout_ms=POLL_MS)
                    for record in (record for records in batches.values() for record in records):
                        if wanted(event := await self._decoder.decode(record.value)):
                            return event
        except TimeoutError:
            raise HeadraceError(Reason.UNAVAILABLE, "a direct producer heard nothing") from None


@asynccontextmanager
async def direct(stack: Stack, tenant: str, key_id: str | None = None) -> AsyncIterator[Direct]:
    """A direct producer with a grant of one of the tenant's keys; by default of the first that holds."""
    key = find_key(await read_tenant(stack.kafka, tenant), key_id)
    grant = Grant(tenant, key.key_id, (INTERACTIVE,), Reply(TOKENS, 0), now_ms() + HOUR_MS)
    headers = ((GRANT_HEADER, mint(grant_secret(stack.options.data_dir), grant).encode()),)
    producer, consumer = EventProducer(stack.kafka, "bench"), make_consumer(stack.kafka)
    await producer.start()
    await consumer.start()
    try:
        places = [
            TopicPartition(topic, each)
            for topic in (TOKENS, LIFECYCLE)
            for each in await partitions_of(consumer, topic)
        ]
        consumer.assign(places)
        await consumer.seek_to_end(*places)
        yield Direct(tenant, headers, producer, consumer, EventDecoder(stack.kafka))
    finally:
        await consumer.stop()
        await producer.stop()
