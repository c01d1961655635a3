"""Parking acts: lets go of the records of requests that wait far back, and has them read again when their turn is near (`decisions.lanes`).

A partition of a batch tier is so read on behind any flood: what other tenants, other models, and cancels have there is heard of in time. The
reading of a flood is paced, for it is work that nobody waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Protocol

import structlog
from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from decisions.cases import Case
from decisions.lanes import PARKED_MAX, Lanes, Place, State, Stub, Wants
from infra import metrics
from infra.log import EventProducer, NoSuchPartition
from infra.settings import AdmissionSettings
from schemas.errors import HeadraceError
from schemas.events import InferenceRejected, Position
from schemas.reasons import Reason
from schemas.topics import LIFECYCLE, requests_topic
from streams.acks import Taken
from streams.faust_shell import Parked
from streams.outbox import Outgoing, deliver, reply_to
from streams.rereading import Rereading

PARKED_A_SECOND_MAX = 1_000
"""No partition is read on faster than that while its records are parked, all together;"""
BURST_S, READ_ON_S = 1.0, 0.5
"""of so many seconds they may come at once, and are read on when so many are left: it takes a while until the next come."""
CALLED_MAX, CALLED_BYTES_MAX = 256, 8 * 1024 * 1024
"""Read again in one go."""
RETRY_S = 1.0
LOST_TEXT = "The request waited for longer than the log keeps requests. Ask anew."

PACED, MANY_PARKED = "a flood is read", "many are parked"

log = structlog.get_logger("streams.parking")


class Again(Protocol):
    """What parking needs of whoever hands on records."""

    def pause(self, partition: int, why: str) -> None:
        """Read no more of a partition for now."""

    def resume(self, partition: int, why: str) -> None:
        """Read on, as far as this reason goes."""

    async def again(self, record: ConsumerRecord, done: Taken) -> asyncio.Task[None]:
        """Handle a record that was parked."""


class Parking:
    """One tier's. What is parked is known here alone, and in the log."""

    def __init__(
        self, settings: AdmissionSettings, producer: EventProducer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`reading` must be set before anything is parked."""
        self._clock = clock
        self._tier = settings.tier
        self._topic = requests_topic(settings.tier)
        self._rereading = Rereading(settings.kafka, self._topic)
        self._producer = producer
        self.reading: Again | None = None
        self.lanes = Lanes()
        self._places: dict[Place, Place] = {}
        self._partitions = 1
        self._paced: set[int] = set()
        self._many: set[int] = set()
        self._until_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self.lanes) or bool(self._paced) or (self._task is not None and not self._task.done())

    def park(self, case: Case, place: Place, size: int, deadline_ms: int) -> Parked:
        """A request waits behind all of its lane: to be raised by whoever handles its record, of so many bytes."""
        grant, source, place = case.grant, case.source, self._places.setdefault(place, place)
        name = case.request.request_id
        stub = Stub(
            source.partition,
            source.offset,
            place,
            grant.tenant,
            grant.key_id,
            name,
            grant.reply,
            deadline_ms,
            size,
        )
        self.lanes.park(stub)
        self._told()
        self._pace(source.partition)
        return Parked(partial(self._keep, stub))

    @staticmethod
    def _keep(stub: Stub, done: Taken) -> None:
        stub.done = done
        if stub.state is State.GONE:  # it was cancelled at that moment
            done()

    def _pace(self, partition: int) -> None:
        assert self.reading is not None
        now_s = self._clock()
        self._until_s = max(self._until_s, now_s) + 1 / PARKED_A_SECOND_MAX
        if self._until_s > now_s + BURST_S and partition not in self._paced:
            self._paced.add(partition)
            self.reading.pause(partition, PACED)
        if self.lanes.full(partition, self._partitions) and partition not in self._many:
            self._many.add(partition)
            self.reading.pause(partition, MANY_PARKED)
            log.warning("no more is parked of a partition", tier=self._tier, partition=partition)

    def _read_on(self) -> None:
        assert self.reading is not None
        if self._paced and self._until_s < self._clock() + READ_ON_S:
            for number in self._paced:
                self.reading.resume(number, PACED)
            self._paced.clear()
        for number in [n for n in self._many if not self.lanes.full(n, self._partitions, PARKED_MAX * 9 // 10)]:
            self._many.discard(number)
            self.reading.resume(number, MANY_PARKED)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """A request isn't wanted any more: whether it was parked. One that is just being read will be told so when it asks to be let in."""
        wanted = self.lanes.find(tenant, request_id) is not None
        for stub in self.lanes.cancel(tenant, request_id):
            if stub.done is not None:
                stub.done()
        self._told()
        return wanted

    # --- reading again -------------------------------------------------------------------------------------------------

    def look(self, wants: Wants) -> None:
        """To be called regularly: reads again what is called for, and reads on what waited for nothing but its pace."""
        self._read_on()
        if self.lanes and (self._task is None or self._task.done()):
            called = self.lanes.call(wants, int(time.time() * 1000), CALLED_MAX, CALLED_BYTES_MAX)
            if called:
                self._task = asyncio.create_task(self._read(called), name="parked records are read again")

    async def _read(self, called: list[Stub]) -> None:
        try:
            for partition, stubs in _by_partition(called):
                records = await self._rereading.read(partition, [stub.offset for stub in stubs])
                at = {record.offset: record for record in records}
                for stub in stubs:
                    await self._handle(stub, at.pop(stub.offset, None))
        except HeadraceError:
            await asyncio.sleep(RETRY_S)
        except Exception:
            log.exception("what is parked can't be read again")
            await asyncio.sleep(RETRY_S)
        finally:
            self.lanes.unread([stub for stub in called if not stub.handled])
            self._told()

    async def _handle(self, stub: Stub, record: ConsumerRecord | None) -> None:
        assert self.reading is not None
        done = stub.done
        if stub.state is not State.CALLED or not isinstance(done, Taken):
            return
        if record is None:
            await self._lost(stub)
        if record is None or stub.unwanted:
            self.lanes.end(stub)
            done()
            return
        stub.handled = True
        task = await self.reading.again(record, done)
        task.add_done_callback(lambda _: self._over(stub))

    def _over(self, stub: Stub) -> None:
        self.lanes.end(stub)
        self._told()

    async def _lost(self, stub: Stub) -> None:
        """The log has no more of a request: its caller is told so, if its reply partition is there."""
        log.error("a parked request is gone from the log", request_id=stub.request_id, offset=stub.offset)
        source = Position(self._topic, stub.partition, stub.offset)
        rejected = InferenceRejected(
            stub.request_id,
            stub.tenant,
            stub.place[0],
            self._tier,
            Reason.PAYLOAD_LOST.value,
            LOST_TEXT,
            source=source,
        )
        with contextlib.suppress(NoSuchPartition):
            records = [
                reply_to(stub.reply, rejected, stub.request_id),
                Outgoing(LIFECYCLE, rejected, stub.tenant, stub.partition),
            ]
            await deliver(self._producer, records)

    async def rest(self) -> None:
        """Nothing is parked at present."""
        try:
            await self._rereading.close()
        except (KafkaError, OSError) as error:
            log.warning("a consumer doesn't close", error=repr(error))

    async def stop(self) -> None:
        """Read nothing again any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._rereading.close()

    # --- partitions come and go ----------------------------------------------------------------------------------------

    def revoked(self, partitions: Collection[int]) -> None:
        """What is parked of these comes again, here or elsewhere."""
        self.lanes.drop(partitions)
        self._told()

    def assigned(self, partitions: Collection[int]) -> None:
        """These are ours now; whatever was paused is read on."""
        self._partitions = len(partitions)
        self._paced.clear()
        self._many.clear()
        self.revoked({stub.partition for stub in self.lanes.all()} - set(partitions))

    def _told(self) -> None:
        metrics.PARKED.labels(self._tier).set(len(self.lanes))


def _by_partition(called: list[Stub]) -> Iterator[tuple[int, list[Stub]]]:
    """Neighbours in the log together."""
    partitions: dict[int, list[Stub]] = {}
    for stub in called:
        partitions.setdefault(stub.partition, []).append(stub)
    for partition, stubs in partitions.items():
        yield partition, sorted(stubs, key=lambda stub: stub.offset)
