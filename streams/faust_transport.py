"""Faust's Kafka transport with its consumer in the application's own event loop.

Faust runs the consumer in a thread of its own, so that slow agents don't stop heartbeats; each fetch then crosses threads
twice. Here nothing holds the loop, and the crossings cost more than the fetch.

Faust also makes four tasks to hand one record on. A batch then takes so long that aiokafka, which waits 0.1 s for what it
has prefetched to be taken, asks the broker for the other partitions alone and gets no more of this one until that request
returns: 1.5 s, by Faust's setting. So records are handed on directly here, and no request waits longer than
`FETCH_WAIT_MS`; where they come by hundreds a second, several are fetched at once (`infra.kafka.GroupedFetch`). They go to the queue of the one topic that is read, as they are: Faust's conductor, events, streams and sensors
would take a tenth of a request's time, and nobody reads what they make of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from faust.types import TP
from mode.utils.futures import maybe_async

from infra.kafka import GroupedFetch
from infra.positions import handed_out

FETCH_WAIT_MS = 250
POLL_S = 1.0
PAUSED_LOOK_S = 0.1


class Message:
    """A record on its way to whoever handles it, with what Faust's `Consumer.ack` asks for."""

    __slots__ = ("__weakref__", "acked", "generation_id", "offset", "record", "topic", "tp")

    def __init__(self, tp: Any, record: Any, generation_id: int) -> None:
        self.tp = tp
        self.record = record
        self.topic: str = record.topic
        self.offset: int = record.offset
        self.generation_id = generation_id
        self.acked = False


class Unreadable:
    """In a record's place: up to this offset stands what no client can read."""

    __slots__ = ("offset", "topic")

    def __init__(self, topic: str, offset: int) -> None:
        self.topic = topic
        self.offset = offset


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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._grouped = GroupedFetch(FETCH_WAIT_MS)
        self._places: dict[Any, tuple[TP, Callable[[], None], Callable[[], None]]] = {}
        self._handed_on: dict[TP, tuple[int, int]] = {}

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
        self._grouped.heard(self._thread._consumer, sum(map(len, records.values())))  # noqa: SLF001
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
                records, active = await self._wait_next_records(POLL_S)
                if self.flow_active:
                    await self._hand_on(records, active, self.app.consumer_generation_id)
                else:
                    await self._seek_back()
                await asyncio.sleep(0)
        except (asyncio.CancelledError, *self.consumer_stopped_errors):
            if not self.app.should_stop:
                raise

    async def _hand_on(self, records: Any, active: Any, generation_id: int) -> None:
        """Into the queue, as long as nothing changes that makes them come again."""
        app, read = self.app, self._read_offset
        for partition, record in self.scheduler.iterate(records):
            if not self.flow_active or self.should_stop or app.consumer_generation_id != generation_id:
                return
            tp = (self._places.get(partition) or self._place(partition))[0]
            if tp not in active and tp not in self._buffered_partitions:
                continue
            offset, before = record.offset, read[tp]
            if before is not None and offset < before:
                continue
            if before is not None and offset - before > 1:  # retention removed what lay between
                await self._add_gap(tp, before + 1, offset - 1)
                if not self.flow_active or app.consumer_generation_id != generation_id:
                    return
            if not await self._put(partition, Message(tp, record, generation_id)):
                return
            read[tp] = offset
            self._handed_on[tp] = generation_id, offset + 1
        await self._pass_over(active, generation_id)

    async def _put(self, partition: Any, message: Message) -> bool:
        """Into the queue, unless a rebalance comes between."""
        queue, (_, on_high, on_drop) = self.transport.queue, self._places.get(partition) or self._place(partition)
        if not queue.full():
            queue.put_nowait_enhanced(message, on_pressure_high=on_high, on_pressure_drop=on_drop)
            return True
        put = asyncio.ensure_future(queue.put(message))
        await asyncio.wait([put])
        return not put.cancelled() and bool(self.app.consumer_generation_id == message.generation_id)

    async def _pass_over(self, active: Any, generation_id: int) -> None:
        """All that was fetched is handed on. What wasn't among it, since no client can read it, is handed on as `Unreadable`, or its partition's end is
        never committed.
        """
        for partition, fetched in handed_out(self._thread._consumer).items():  # noqa: SLF001
            tp = TP(*partition)
            generation, below = self._handed_on.get(tp, (generation_id, 0))
            if generation != generation_id or not below:
                below = self._committed_offset[tp] or 0
            if tp not in active or fetched <= below:
                continue
            if not self.flow_active or self.should_stop or self.app.consumer_generation_id != generation_id:
                return
            position = handed_out(self._thread._consumer).get(partition, 0)  # noqa: SLF001 - what was handed on before took time
            if position <= below:
                continue
            if below:  # else nothing is committed, and any offset will do
                await self._add_gap(tp, below, position - 2)
            if not await self._put(partition, Message(tp, Unreadable(tp.topic, position - 1), generation_id)):
                return
            self._read_offset[tp] = position - 1
            self._handed_on[tp] = generation_id, position

    async def _seek_back(self) -> None:
        """What was fetched while a rebalance began is fetched again."""
        try:
            await self.perform_seek()
        except Exception as error:
            self.log.warning("can't seek to what is committed: %r", error)

    def _place(self, partition: Any) -> tuple[TP, Callable[[], None], Callable[[], None]]:
        """A partition of aiokafka's as Faust names it, and what is called when the queue is too full to read on of it, and when it has room again."""
        tp = TP(*partition)
        made = self._places[tp] = tp, partial(self.on_buffer_full, tp), partial(self.on_buffer_drop, tp)
        return made


class OneLoopTransport(Transport):  # type: ignore[misc]
    """Give it to an app as its `transport`, and it the queue of the topic's channel: each `Message` comes there."""

    Consumer = OneLoopConsumer
    queue: Any = None


__all__ = ["Message", "OneLoopConsumer", "OneLoopTransport", "Unreadable"]
