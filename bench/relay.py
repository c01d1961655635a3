"""The peer of `admission`: one process that reads a topic and writes each record on, and decides nothing.

`python -m bench.relay BOOTSTRAP FROM TO`. What it costs is what Kafka's client costs; the rest of admission's time is its own.
"""

from __future__ import annotations

import asyncio
import sys

from infra.kafka import make_consumer, make_producer
from infra.settings import KafkaSettings

POLLED_MAX = 500


async def relay(settings: KafkaSettings, source: str, target: str) -> None:
    """Copies until it is killed; a record's place is committed once its copy is confirmed."""
    consumer, producer = make_consumer(settings, group="relay", auto_offset_reset="latest"), make_producer(settings)
    await producer.start()
    consumer.subscribe([source])
    await consumer.start()
    while True:
        futures = []
        for records in (await consumer.getmany(timeout_ms=500, max_records=POLLED_MAX)).values():
            futures += [await producer.send(target, value=item.value, key=item.key) for item in records]
        if futures:
            await asyncio.gather(*futures)
            await consumer.commit()


if __name__ == "__main__":
    asyncio.run(relay(KafkaSettings(sys.argv[1]), *sys.argv[2:]))
