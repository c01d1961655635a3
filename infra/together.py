"""Records that stand in the log all together or not at all: they are one batch."""

from __future__ import annotations

from collections.abc import Sequence

from aiokafka.producer.message_accumulator import BatchBuilder

from schemas.codec import encode, encode_json
from schemas.events import Event
from schemas.topics import RECORD_MAX_BYTES

BATCH_BYTES_MAX = RECORD_MAX_BYTES - 64 * 1024
"""Records that are written together, in bytes: what a topic takes as one record, less what a batch takes itself."""


def together(
    events: Sequence[Event], key: str, headers: Sequence[tuple[str, bytes]], encoding: str
) -> BatchBuilder | None:
    """A batch that takes no other records; None if they are more than it takes."""
    batch = BatchBuilder(BATCH_BYTES_MAX, 0)
    size = 0
    for event in events:
        value = encode(event) if encoding == "avro" else encode_json(event)
        size += len(value)
        taken = batch.append(timestamp=None, key=key.encode(), value=value, headers=list(headers))
        if taken is None or size > BATCH_BYTES_MAX:
            return None
    batch.close()  # else the producer would add other records to it
    return batch
