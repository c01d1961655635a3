"""Makes aiokafka take a breath when its metadata can't be updated, and close its connections at once.

Its fetcher and sender ask for new metadata as soon as they have got none, as long as a partition has no leader. While the only broker is
away each attempt fails at once, so a client spins: it holds the event loop and writes thousands of log lines a second.

A connection over TLS closes when its peer has said goodbye, too, or after 30 s without a word; whoever stops a client waits for that.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection

FAILED_UPDATE_WAIT_S = 0.1


_original = AIOKafkaClient._metadata_update  # noqa: SLF001
_close = AIOKafkaConnection.close


def pace_failed_updates() -> None:
    """Make all of this process's clients wait `FAILED_UPDATE_WAIT_S` after a failed update. Calling it again changes nothing."""
    AIOKafkaClient._metadata_update = _update  # noqa: SLF001


async def _update(self: Any, cluster_metadata: Any, topics: Any) -> bool:
    updated: bool = await _original(self, cluster_metadata, topics)
    if not updated:
        await asyncio.sleep(FAILED_UPDATE_WAIT_S)
    return updated


def close_at_once() -> None:
    """Make all of this process's connections to brokers end when they are closed. Whoever closes one waits for no answer on it any more."""
    AIOKafkaConnection.close = _close_at_once


def _close_at_once(self: Any, reason: Any = None, exc: Any = None) -> Any:
    writer = self._writer
    closed = _close(self, reason=reason, exc=exc)
    if writer is not None:
        with suppress(AttributeError):  # before Python 3.11.5, of a TLS connection that the broker has closed already
            writer.transport.abort()
    return closed
