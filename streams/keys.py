"""Reads which idempotency keys a partition remembers, for whoever has just been given it."""

from __future__ import annotations

import asyncio

import structlog
from aiokafka.errors import KafkaError

from decisions.idempotency import KEYS_MAX, KeyIndex
from infra.log import EventDecoder
from infra.read import read_to_end
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import RequestKeyed
from schemas.topics import idempotency_topic

RETRY_S = 1.0
RECORDS_A_TURN = 256

log = structlog.get_logger("streams.keys")


async def read_keys(settings: KafkaSettings, decoder: EventDecoder, tier: str, partition: int, keys: KeyIndex) -> None:
    """Tell an index all that the partition remembers now, as far as it has room; however long that takes."""
    while True:
        try:
            records = read_to_end(settings, idempotency_topic(tier), only=(partition,), last=KEYS_MAX)
            count = 0
            async for record in records:
                event = await decoder.decode_or_pass_over(record)
                if isinstance(event, RequestKeyed):
                    keys.hear(event)
                count += 1
                if count % RECORDS_A_TURN == 0:
                    await asyncio.sleep(0)
            return
        except (KafkaError, HeadraceError, OSError) as error:
            log.warning("the keys can't be read", partition=partition, error=repr(error))
            await asyncio.sleep(RETRY_S)
