"""Kafka consumers that read back in the log, lent for one reading after another: to start one takes longer than many a reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer

from infra.kafka import make_consumer
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError

IDLE_S = 30.0
"""How long a consumer that nobody uses is kept."""
START_WAIT_S = 5.0
"""How long a client that nobody waits for any more may take to start before it is stopped."""
FETCH_WAIT_MS = 100
"""How long the broker may hold a fetch at a partition's end: what is asked next on the same connection waits behind it."""

_log = structlog.get_logger(__name__)


class Gone(Exception):
    """The records from the place on are no longer in the partition. Never leaves this room."""


class Readers:
    """Lends consumers with nothing assigned, at most so many at once; whoever wants one more waits its turn.

    Attributes:
        started: how many consumers were started so far.
    """

    def __init__(self, settings: KafkaSettings, lent_max: int) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(lent_max)
        self._idle: list[tuple[float, AIOKafkaConsumer]] = []  # since when, in loop time; the last one is lent next
        self._ending: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._stopped = False
        self.started = 0

    @property
    def idle(self) -> int:
        """How many consumers are kept for the next reading."""
        return len(self._idle)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AIOKafkaConsumer]:
        """A started consumer that raises where a place has gone. Raises KafkaError. One whose reading was broken off isn't lent again."""
        async with self._slots:
            consumer = self._idle.pop()[1] if self._idle else await self._start()
            try:
                yield consumer
            except (HeadraceError, Gone):  # what was found, not what went wrong
                self._keep(consumer)
                raise
            except BaseException:
                self._end(consumer)
                raise
            self._keep(consumer)

    async def _start(self) -> AIOKafkaConsumer:
        # A place that has gone must not be skipped.
        consumer = make_consumer(self._settings, auto_offset_reset="none", fetch_max_wait_ms=FETCH_WAIT_MS)
        self.started += 1
        starting = asyncio.create_task(consumer.start(), name="start a reader")
        try:
            await asyncio.shield(starting)
        except BaseException:
            self._end(consumer, starting)
            raise
        return consumer

    def _keep(self, consumer: AIOKafkaConsumer) -> None:
        if self._stopped:
            self._end(consumer)
            return
        # It fetches nothing meanwhile. `unsubscribe` kills aiokafka's fetcher if that hasn't seen the last assignment yet.
        consumer.assign([])
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), consumer))
        if self._expiry is None:
            self._expiry = loop.call_later(IDLE_S, self._expire)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._expiry = None
        while self._idle and self._idle[0][0] + IDLE_S <= loop.time():
            self._end(self._idle.pop(0)[1])
        if self._idle:
            self._expiry = loop.call_at(self._idle[0][0] + IDLE_S, self._expire)

    def _end(self, consumer: AIOKafkaConsumer, starting: asyncio.Task[None] | None = None) -> None:
        task = asyncio.create_task(_stop(consumer, starting), name="stop a reader")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """Stop all that is kept; what is still lent is stopped when it comes back."""
        self._stopped = True
        if self._expiry is not None:
            self._expiry.cancel()
        while self._idle:
            self._end(self._idle.pop()[1])
        await asyncio.gather(*self._ending)


async def _stop(consumer: AIOKafkaConsumer, starting: asyncio.Task[None] | None) -> None:
    try:
        if starting is not None:
            await begun(starting)
        await consumer.stop()
    except Exception as error:  # nobody waits for it
        _log.warning("a reader couldn't be stopped", error=repr(error))


async def begun(starting: asyncio.Task[Any]) -> None:
    """Let a client's start end before it is stopped: aiokafka loses a connection that is being made when its start is cancelled."""
    await asyncio.wait({starting}, timeout=START_WAIT_S)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
