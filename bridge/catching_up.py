"""Streams that were taken up again catch up with those who follow their partition: one reading serves all of them.

When a front door dies, all its callers come to the others at once, and their places are near each other. If each read for itself, the
cost would be streams times records. So whoever wants to catch up waits for the partition's scan, which begins at the lowest place.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from bridge.calls import Leg
from bridge.errors import unreachable
from bridge.readers import Gone, Readers
from bridge.replay import poll, span
from bridge.streams import RECORDS_A_TURN, Dispatcher, OnJoined, fetched, peek_request_id, read_input
from decisions.stream import Input
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import InferenceJoined, PayloadStored
from schemas.reasons import Reason

SCANS_MAX = 16
"""Partitions that are scanned, or asked for their ends, at once; others wait their turn."""
ROOM_WAIT_S = 0.5
"""How long one pass waits, in all, for callers that haven't taken what they got, and for the object store. Then they leave it, and join a later one."""
FETCHES_MAX = 16
"""Events that are fetched from the object store at once; one at a time for each stream."""
SHORT_WAIT_S = 5.0
"""How long a log that ends before a place that was read once may take to be whole: a broker that starts anew shows all of it after a while."""
SHORT_POLL_S = 0.2

_IDS = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_log = structlog.get_logger(__name__)


class CatchingUp:
    """The scans of all partitions.

    Attributes:
        passes, records: how often a partition was read, and how many records, so far.
        on_joined: hears of each leg whose request was asked before; see `Dispatcher`.
    """

    def __init__(self, settings: KafkaSettings, decoder: EventDecoder) -> None:
        self.decoder = decoder
        self.readers = Readers(settings, SCANS_MAX)
        self.passes = 0
        self.records = 0
        self.on_joined: OnJoined | None = None
        self._scans: dict[TopicPartition, _Scan] = {}
        self._spans: dict[TopicPartition, asyncio.Task[tuple[int, int] | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._fetching: set[asyncio.Task[Input | None]] = set()

    async def check(self, partition: TopicPartition, offset: int) -> None:
        """Whether a partition can be read from an offset on. Raises Gone; HeadraceError (not_found) if the log doesn't reach so far."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SHORT_WAIT_S
        while True:
            found = await self._span(partition)
            if found is not None and offset < found[0]:
                raise Gone
            if found is not None and offset <= found[1]:
                return
            if found is None or loop.time() > until_s:
                raise HeadraceError(Reason.NOT_FOUND, "there is no such stream")
            await asyncio.sleep(SHORT_POLL_S)

    async def _span(self, partition: TopicPartition) -> tuple[int, int] | None:
        """The partition's first offset and its end; None if there is no such partition. All who ask at once share one question."""
        asking = self._spans.get(partition)
        if asking is None:
            asking = self._spans[partition] = asyncio.create_task(self._ask(partition), name="ask for a span")
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waited may have left
        return await asyncio.shield(asking)

    async def _ask(self, partition: TopicPartition) -> tuple[int, int] | None:
        try:
            async with self.readers.lend() as consumer:
                return await span(consumer, partition)
        finally:
            del self._spans[partition]

    def join(self, leg: Leg, offset: int, follower: Dispatcher) -> None:
        """Feed a leg from an offset of its follower's partition up to where the follower stands; then the follower feeds it.

        Ends with the call, whose deadline bounds it; a partition that can't be read fails it.
        """
        self._put(_Catching(leg, offset, follower, self))

    def _put(self, catching: _Catching) -> None:
        if catching.settled(catching.offset):
            return
        partition = catching.follower.partition
        scan = self._scans.get(partition)
        if scan is None:
            scan = self._scans[partition] = _Scan(self, partition)
            self._start(scan)
        scan.waiting.append(catching)

    def _start(self, scan: _Scan) -> None:
        async def run() -> None:
            try:
                await scan.run()
            finally:
                del self._scans[scan.partition]  # in the step in which it saw that nobody waits

        self._spawn(run(), f"scan {scan.partition.topic} {scan.partition.partition}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def rejoin(self, catching: _Catching) -> None:
        """It joins again from its own place, once its caller has taken most of what it has, and what it waits for is fetched."""

        async def wait() -> None:
            await catching.leg.call.room()
            if catching.fetching is not None:
                await asyncio.wait({catching.fetching[1]})
            self._put(catching)

        self._spawn(wait(), "wait for room")

    def fetch(self, reference: PayloadStored, catching: _Catching, offset: int) -> asyncio.Task[Input | None]:
        """Begins to get an event out of the object store; a fault that isn't the event's own fails the call."""

        async def get() -> Input | None:
            try:
                async with self._fetches:
                    return await fetched(self.decoder, reference, catching.follower.partition, offset)
            except Exception as error:  # whatever it was, no caller must wait for ever
                _log.warning("an event can't be fetched", request_id=reference.request_id, error=repr(error))
                catching.leg.call.fail(unreachable())
                return None

        task = asyncio.create_task(get(), name="fetch")
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)
        return task

    async def stop(self) -> None:
        """Read no more."""
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *self._spans.values(), *self._fetching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.readers.stop()


@dataclass(slots=True, eq=False)
class _Catching:
    """A leg on its way.

    Attributes:
        offset: where it joined.
        held: what its call has no room for yet, or what is still to be fetched first, by offsets.
        fetching: the offset of what is fetched for it, and the task that does.
        moved: its leg reads another stream now.
    """

    leg: Leg
    offset: int
    follower: Dispatcher
    owner: CatchingUp
    held: deque[tuple[int, Input | PayloadStored]] = field(default_factory=deque)
    fetching: tuple[int, asyncio.Task[Input | None]] | None = None
    moved: bool = False

    def settled(self, position: int) -> bool:
        """Whether it needs no more when all before `position` has been read. Nothing is missed in between: this is one step of the loop."""
        if self.leg.call.done or self.moved:
            return True
        if self.follower.ended:
            self.leg.call.fail(unreachable())
            return True
        if position < self.follower.position:
            return False
        self.follower.register(self.leg)
        return True

    def hear(self, event: InferenceJoined) -> None:
        """Its request was asked before."""
        if self.owner.on_joined is not None and not self.moved:
            self.moved = self.owner.on_joined(self.leg, event, self.follower)

    def feed(self, event: Input | PayloadStored, offset: int) -> None:
        """What there is no room for is held, and so is what must be fetched, and all that comes after it."""
        call = self.leg.call
        if self.moved:
            return
        if self.held or isinstance(event, PayloadStored) or not call.has_room:
            self.held.append((offset, event))
        else:
            call.feed(self.leg, event, self.follower.partition.partition, offset)

    async def drain(self) -> None:
        """Feed what is held, as there is room for it."""
        call = self.leg.call
        while self.held:
            await call.room()
            offset, event = self.held[0]
            found = await self._whole(event, offset) if isinstance(event, PayloadStored) else event
            self.held.popleft()
            if found is not None:
                call.feed(self.leg, found, self.follower.partition.partition, offset)

    async def _whole(self, reference: PayloadStored, offset: int) -> Input | None:
        """Fetched once, however often this is cut off."""
        if self.fetching is None or self.fetching[0] != offset:
            self.fetching = offset, self.owner.fetch(reference, self, offset)
        found = await asyncio.shield(self.fetching[1])
        self.fetching = None
        return found


class _Scan:
    """Reads one partition, pass after pass, as long as somebody waits."""

    def __init__(self, owner: CatchingUp, partition: TopicPartition) -> None:
        self._owner = owner
        self.partition = partition
        self.waiting: list[_Catching] = []
        self._batch: list[_Catching] = []
        self._by_id: dict[str, list[_Catching]] = {}
        self._patience_s = 0.0

    async def run(self) -> None:
        """Returns when nobody waits any more."""
        while self.waiting:
            try:
                async with self._owner.readers.lend() as consumer:
                    while self.waiting:
                        await self._pass(consumer)
            except Exception as error:  # whatever it was, no caller must wait for ever
                _log.warning("a partition can't be scanned", partition=self.partition.partition, error=repr(error))
                failed, self._batch, self.waiting = [*self._batch, *self.waiting], [], []
                for catching in failed:
                    if not catching.moved:
                        catching.leg.call.fail(unreachable())

    async def _pass(self, consumer: AIOKafkaConsumer) -> None:
        """Read on from the lowest place of all who wait, until each has caught up with its follower, left, or has no room."""
        owner, partition = self._owner, self.partition
        begin = (await consumer.beginning_offsets([partition]))[partition]
        self._batch, self.waiting = self.waiting, []
        for catching in self._batch:
            if catching.offset < begin:  # gone since it was looked for: its caller finds the rest when it comes back
                catching.leg.call.fail(unreachable())
        consumer.assign([partition])
        self._patience_s = ROOM_WAIT_S
        position = max(begin, min(catching.offset for catching in self._batch))
        consumer.seek(partition, position)
        owner.passes += 1
        while True:
            ahead = [catching for catching in self.waiting if catching.offset >= position]
            if ahead:  # they came meanwhile, and all they need is still to be read
                self.waiting = [catching for catching in self.waiting if catching.offset < position]
            self._batch = [catching for catching in (*self._batch, *ahead) if not catching.settled(position)]
            if not self._batch:
                return
            self._by_id = {}
            for catching in self._batch:
                self._by_id.setdefault(catching.leg.request_id, []).append(catching)
            records = await poll(consumer, partition)
            owner.records += len(records)
            await self._hand_on(records)
            position = await consumer.position(partition)

    async def _hand_on(self, records: Sequence[ConsumerRecord]) -> None:
        for i, record in enumerate(records):
            if i % RECORDS_A_TURN == RECORDS_A_TURN - 1:
                await asyncio.sleep(0)
            if not record.value or not self._is_wanted(record.value):
                continue
            event = await read_input(self._owner.decoder, record.value, self.partition, record.offset)
            if event is not None:
                for catching in self._by_id.get(event.request_id, ()):
                    if isinstance(event, InferenceJoined):
                        catching.hear(event)
                    else:
                        catching.feed(event, record.offset)
        full = [catching for catching in self._batch if catching.held]
        if full:
            await self._await_room(full)

    def _is_wanted(self, value: bytes) -> bool:
        """Whether it may be about one of the batch: all encodings hold a request's id as plain text, which spares decoding all others."""
        found = peek_request_id(value)
        if found is not None:
            return found in self._by_id
        return any(match.decode() in self._by_id for match in _IDS.findall(value))

    async def _await_room(self, full: Sequence[_Catching]) -> None:
        """Whoever has no room for long leaves the pass, so that it holds nobody."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        draining = {asyncio.create_task(catching.drain(), name="drain"): catching for catching in full}
        try:
            await asyncio.wait(draining, timeout=self._patience_s)
        finally:
            for task in draining:
                task.cancel()
        for result in await asyncio.gather(*draining, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._patience_s = max(0.0, self._patience_s - (loop.time() - began_s))
        slow = {catching for catching in full if catching.held}
        self._batch = [catching for catching in self._batch if catching not in slow]
        for catching in slow:
            catching.offset = catching.held[0][0]
            catching.held.clear()
            self._owner.rejoin(catching)
