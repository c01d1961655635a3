"""Faust's Kafka transport with its consumer in the application's own event loop.

Faust runs the consumer in a thread of its own, so that slow agents don't stop heartbeats; each fetch then crosses threads
twice. Here nothing holds the loop, and the crossings cost more than the fetch.

Faust also makes four tasks to hand one record on. A batch then takes so long that aiokafka, which waits 0.1 s for what it
has prefetched to be taken, asks the broker for the other partitions alone and gets no more of this one until that request
returns: 1.5 s, by Faust's setting. So records are handed on directly here, and no request waits longer than
`FETCH_WAIT_MS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from mode.utils.futures import maybe_async

FETCH_WAIT_MS = 250
POLL_S = 1.0
PAUSED_LOOK_S = 0.1


class OneLoopConsumerThread(AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust is not analysed
    """A "consumer thread" that is no thread: it starts, works and stops in the loop of the application."""

    abstract = False
    wait_for_shutdown = False

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, thread_loop=options.get("loop") or consumer.loop, **options)

    def _create_consumer(self, loop: Any) -> Any:
        consumer = super()._create_consumer(loop=loop)
        consumer._fetch_max_wait_ms = FETCH_WAIT_MS  # noqa: SLF001  # Faust has no setting for it
        return consumer

    async def start(self) -> None:
        """Connect the consumer; its tasks run beside the application's."""
        self._thread_started.set()
        await self._default_start()

    async def stop(self) -> None:
        """Disconnect the consumer, leaving its group."""
        if self._started.is_set() and not self._stopped.is_set():
            self._stopped.set()
            if self._consumer is not None:
                await self._consumer.stop()
            await self._default_stop_futures()

    async def call_thread(self, fun: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """Call at once what would be handed to the thread."""
        return await maybe_async(fun(*args, **options))

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Tell the application before the group moves on."""
        await self.consumer.on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: Any, generation_id: int = 0) -> None:
        """Tell the application what it has now."""
        await self.consumer.on_partitions_assigned(assigned, generation_id)

    def close(self) -> None:
        """Nothing to close from outside: `stop` does all."""


class OneLoopConsumer(Consumer):  # type: ignore[misc]
    """A consumer that delegates to no thread."""

    def _new_consumer_thread(self) -> Any:
        return OneLoopConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _wait_next_records(self, timeout: float) -> tuple[Any, Any]:
        """Fetches, and says from where. Faust hands its own set of active partitions on: where that is emptied by a pause while a fetch is on
        its way, aiokafka takes an empty one for all, and what it then gives would be dropped as if nobody had asked.
        """
        if not self.flow_active:
            await self.wait(self.can_resume_flow)
        active = set(self._get_active_partitions())
        self.not_waiting_next_records.set()
        if not active:
            # Who is paused isn't idle: aiokafka would leave the group after a while, and Faust never come back.
            with self._thread._consumer._fetcher._subscriptions.fetch_context():  # noqa: SLF001
                await self.sleep(PAUSED_LOOK_S)
            return {}, active
        records = await self._getmany(active_partitions=set(active), timeout=timeout)
        return records, active

    def on_buffer_drop(self, tp: Any) -> None:
        """There is room for a partition's records again: it is read on, unless it is paused for another reason."""
        if tp in self._buffered_partitions:
            self._buffered_partitions.discard(tp)
            if tp not in self._paused_partitions:
                self._get_active_partitions().add(tp)

    async def _drain_messages(self, fetcher: Any) -> None:
        """Hand records on in order, until either stops. A record that was read before a rebalance is handed on again."""
        try:
            while not (self.should_stop or fetcher.should_stop):
                async for partition, message in self.getmany(timeout=POLL_S):
                    before = self._read_offset[partition]
                    if before is not None and message.offset < before:
                        continue
                    if before and message.offset - before > 1:  # retention removed what lay between
                        await self._add_gap(partition, before + 1, message.offset - 1)
                    await self.callback(message)
                    self._read_offset[partition] = message.offset
                await asyncio.sleep(0)
        except (asyncio.CancelledError, *self.consumer_stopped_errors):
            if not self.app.should_stop:
                raise


class OneLoopTransport(Transport):  # type: ignore[misc]
    """Give it to an app as its `transport`."""

    Consumer = OneLoopConsumer


__all__ = ["OneLoopConsumer", "OneLoopTransport"]
