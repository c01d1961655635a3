"""The partitions of `tokens` topics that are followed: this bridge's own always, any other while a resumed answer stands in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog
from aiokafka import TopicPartition

from bridge.errors import unreachable
from bridge.readers import begun
from bridge.streams import Dispatcher, OnJoined
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.reasons import Reason

FOLLOWED_MAX = 64
"""Partitions followed at once; a stream in one more is refused, and may be resumed on another bridge or later."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Followed:
    dispatcher: Dispatcher
    reading: asyncio.Task[None] | None = None
    users: int = 0


class Followers:
    """Hands out the dispatcher of a partition; one that nobody uses any more is stopped. `on_joined` is theirs."""

    def __init__(self, settings: KafkaSettings, own: Dispatcher, decoder: EventDecoder) -> None:
        """`own` is started and stopped by others."""
        self._settings = settings
        self._own = own
        self._decoder = decoder
        self._followed: dict[TopicPartition, _Followed] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self.on_joined: OnJoined | None = None

    def __len__(self) -> int:
        """How many partitions beside this bridge's own are followed."""
        return len(self._followed)

    async def acquire(self, partition: TopicPartition) -> Dispatcher:
        """The running dispatcher of a partition; `release` it. Raises HeadraceError (overloaded), KafkaError."""
        if partition == self._own.partition:
            return self._own
        async with self._lock:
            found = self._followed.get(partition)
            if found is None:
                if len(self._followed) >= FOLLOWED_MAX:
                    text = "this front door follows all the partitions it can"
                    raise HeadraceError(Reason.OVERLOADED, text, retry_after_ms=1000)
                found = await self._start(partition)
            found.users += 1
        return found.dispatcher

    async def _start(self, partition: TopicPartition) -> _Followed:
        dispatcher = Dispatcher(self._settings, partition.partition, self._decoder, partition.topic)
        dispatcher.on_joined = self.on_joined
        found = _Followed(dispatcher)
        starting = asyncio.create_task(dispatcher.start(), name="start following")
        try:
            found.reading = await asyncio.shield(starting)
        except BaseException:
            self._stop(dispatcher, starting)
            raise
        self._followed[partition] = found

        def ended(task: asyncio.Task[None]) -> None:
            if self._followed.get(partition) is found:  # by an error: it wasn't stopped
                _log.warning("a partition can't be followed", topic=partition.topic, partition=partition.partition)
                dispatcher.fail(unreachable())
                self._drop(partition)
            if not task.cancelled():
                task.exception()

        found.reading.add_done_callback(ended)
        return found

    def release(self, dispatcher: Dispatcher) -> None:
        """One user less."""
        found = self._followed.get(dispatcher.partition)
        if found is None or found.dispatcher is not dispatcher:
            return
        found.users -= 1
        if found.users == 0:
            self._drop(dispatcher.partition)

    def _drop(self, partition: TopicPartition) -> None:
        self._stop(self._followed.pop(partition).dispatcher)

    def _stop(self, dispatcher: Dispatcher, starting: asyncio.Task[asyncio.Task[None]] | None = None) -> None:
        async def stop() -> None:
            if starting is not None:
                await begun(starting)
            await dispatcher.stop()

        task = asyncio.create_task(stop(), name="stop following")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def stop(self) -> None:
        """Stop all but the bridge's own."""
        for partition in list(self._followed):
            self._drop(partition)
        await asyncio.gather(*self._stopping, return_exceptions=True)
