"""Keeps what aiokafka can't read from stopping every reader of its partition.

The protocol says that header names are UTF-8, brokers don't check it, and some client libraries write whatever bytes
they are given. Others compress in ways for which there may be no library here. aiokafka then raises from each fetch,
for ever, without moving on. Here such a batch ends at the bad record: what stood before it is handed out, and the
reader goes on after the batch, which is one client's. It is logged and counted, since its bytes can't be had for
`dead-letters`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import structlog
from aiokafka.consumer.fetcher import PartitionRecords
from aiokafka.errors import UnsupportedCodecError

from infra import metrics

NAME, CODEC = "header_name", "compression"

_log = structlog.get_logger("consumer")


def pass_over_foreign_names() -> None:
    """Make all of this process's aiokafka consumers pass such batches over. Calling it again changes nothing."""
    if PartitionRecords.__next__ is not _next:
        PartitionRecords.__next__ = _next


def _next(self: Any) -> Any:
    iterator = self._records_iterator
    if iterator is None:
        raise StopIteration
    try:
        return next(iterator)
    except StopIteration:
        self._records_iterator = None
        raise
    except (UnicodeDecodeError, UnsupportedCodecError) as error:
        self._records_iterator = None
        topic, partition = self._tp
        first = self.next_fetch_offset
        self.next_fetch_offset = max(first + 1, _end_of_batch(error.__traceback__))
        reason = NAME if isinstance(error, UnicodeDecodeError) else CODEC
        metrics.DEAD_LETTERS.labels(metrics.topic_label(topic), reason).inc()
        _log.error(
            "records passed over: they can't be read",
            reason=reason,
            error=str(error),
            topic=topic,
            partition=partition,
            offset=first,
            until_offset=self.next_fetch_offset,
        )
        raise StopIteration from None


def _end_of_batch(traceback: TracebackType | None) -> int:
    """The offset after the batch that was being read, which only the frame that failed knows; 0 if it can't be found."""
    while traceback is not None:
        batch = traceback.tb_frame.f_locals.get("next_batch")
        if batch is not None:
            return int(batch.next_offset)
        traceback = traceback.tb_next
    return 0
