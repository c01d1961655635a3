"""For logs that tests play: what is written as bytes is written as the event in them."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka.structs import RecordMetadata

from schemas.codec import Codec, encode


class BytesTaken:
    """A producer that has `send`."""

    async def encoded(self, event: Any) -> bytes:
        return encode(event)

    async def send_raw(self, topic: str, value: bytes, *_more: Any) -> asyncio.Future[RecordMetadata]:
        sent: asyncio.Future[RecordMetadata] = await self.send(topic, Codec().decode(value))  # type: ignore[attr-defined]
        return sent
