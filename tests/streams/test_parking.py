"""Parked requests come back in time, once, whatever becomes of the log, of their callers' wish and of their partition meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.structs import RecordMetadata

from decisions.cases import Case
from decisions.lanes import PARKED_MAX
from infra import metrics
from infra.grants import Grant
from infra.settings import AdmissionSettings
from schemas.errors import HeadraceError
from schemas.events import InferenceRejected, InferenceRequested, Position, Reply
from schemas.reasons import Reason
from schemas.topics import BATCH, LIFECYCLE, requests_topic
from streams import parking as module
from streams.acks import InOrderAcks, Taken
from streams.parking import MANY_PARKED, PACED, Parking
from tests.streams.bytes_taken import BytesTaken

TOPIC, PLACE = requests_topic(BATCH), ("m", "v1")
REPLY = Reply("tokens.acme", 0, "json")
LATER_MS = 10**15


class Log:
    """The log, which has some records and may be away; what is told in it; and whoever hands records on."""

    def __init__(self) -> None:
        self.there: set[int] = set(range(10_000))
        self.away = False
        self.read_: list[list[int]] = []
        self.told: list[tuple[str, Any]] = []
        self.again_: list[int] = []
        self.paused: set[tuple[int, str]] = set()
        self.handle: Any = lambda _offset: None

    async def read(self, _partition: int, offsets: Iterable[int]) -> list[ConsumerRecord]:
        await asyncio.sleep(0)
        if self.away:
            raise HeadraceError(Reason.UNAVAILABLE, "away")
        self.read_.append(sorted(offsets))
        known = [offset for offset in self.read_[-1] if offset in self.there]
        return [ConsumerRecord(TOPIC, 0, offset, 0, 0, None, b"", None, -1, 0, ()) for offset in known]

    async def close(self) -> None: ...

    def pause(self, partition: int, why: str) -> None:
        self.paused.add((partition, why))

    def resume(self, partition: int, why: str) -> None:
        self.paused.discard((partition, why))

    async def again(self, record: ConsumerRecord, done: Taken) -> asyncio.Task[None]:
        self.again_.append(record.offset)

        async def handle() -> None:
            self.handle(record.offset)
            done()

        return asyncio.create_task(handle())


class Producer(BytesTaken):
    def __init__(self, log: Log) -> None:
        self._log = log

    async def send(self, topic: str, event: Any, **_more: Any) -> asyncio.Future[RecordMetadata]:
        self._log.told.append((topic, event))
        confirmed: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        confirmed.set_result(RecordMetadata(topic, 0, TopicPartition(topic, 0), 0, 0, 0, 0))
        return confirmed


class Site:
    """Parking, and records that are parked there as the shell would."""

    def __init__(self) -> None:
        self.log, self.acks, self.acked = Log(), InOrderAcks(), list[int]()
        producer: Any = Producer(self.log)
        self.now_s = 100.0
        self.parking = Parking(AdmissionSettings(tier=BATCH), producer, lambda: self.now_s)
        self.parking.reading = self.log
        self.parking._rereading = self.log  # type: ignore[assignment]

    def park(self, offset: int, deadline_ms: int = LATER_MS) -> None:
        grant = Grant("acme", "k1", (BATCH,), REPLY, 0)
        case = Case(InferenceRequested(f"r{offset}", "m"), grant, BATCH, 0, Position(TOPIC, 0, offset))
        done = self.acks.take((TOPIC, 0), lambda: self.acked.append(offset))
        self.parking.park(case, PLACE, 100, deadline_ms).keep(done)

    async def look(self, want: int = 100) -> None:
        self.parking.look(lambda *_: want)
        if self.parking._task is not None:
            await self.parking._task
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    return Site()


async def test_what_is_wanted_is_read_in_one_go_and_handled_in_order(site: Site) -> None:
    for offset in range(5):
        site.park(offset)
    await site.look(3)
    assert (site.log.read_, site.log.again_, site.acked) == ([[0, 1, 2]], [0, 1, 2], [0, 1, 2])
    assert len(site.parking.lanes) == 2
    await site.look()
    assert site.acked == [0, 1, 2, 3, 4]
    assert not site.parking.busy
    assert metrics.PARKED.labels(BATCH)._value.get() == 0


async def test_while_the_log_is_away_it_waits_and_keeps_its_place(site: Site) -> None:
    for offset in range(3):
        site.park(offset)
    site.log.away = True
    await site.look(2)
    assert site.log.again_ == []
    site.log.away = False
    await site.look(2)
    assert site.log.again_ == [0, 1]


async def test_who_waited_longer_than_the_log_keeps_requests_is_told_so(site: Site) -> None:
    site.park(1)
    site.log.there.clear()
    await site.look()
    assert [topic for topic, _ in site.log.told] == [REPLY.topic, LIFECYCLE]
    told = site.log.told[0][1]
    assert isinstance(told, InferenceRejected)
    assert (told.request_id, told.reason, told.source) == ("r1", "payload_lost", Position(TOPIC, 0, 1))
    assert (site.acked, len(site.parking.lanes)) == ([1], 0)


async def test_at_its_deadline_it_is_read_again_though_its_lane_wants_none(site: Site) -> None:
    site.park(1)
    site.park(2, deadline_ms=1)
    await site.look(0)
    assert site.log.again_ == [2]


async def test_cancelled_it_is_done_and_never_read(site: Site) -> None:
    site.park(1)
    site.park(2)
    assert site.parking.cancel("acme", "r1")
    assert not site.parking.cancel("acme", "r1")
    assert not site.parking.cancel("other", "r2")
    await site.look()
    assert (site.log.again_, site.acked) == ([2], [1, 2])


async def test_cancelled_while_it_is_read_it_is_done_and_not_handled(site: Site) -> None:
    site.park(1)
    site.parking.look(lambda *_: 1)
    assert site.parking.cancel("acme", "r1")
    await site.look()
    assert (site.log.again_, site.acked, len(site.parking.lanes)) == ([], [1], 0)


async def test_of_a_partition_that_goes_while_it_is_read_nothing_is_handled(site: Site) -> None:
    site.park(1)
    site.parking.look(lambda *_: 1)
    site.acks.drop([(TOPIC, 0)])
    site.parking.revoked({0})
    await site.look()
    assert (site.log.again_, site.acked, site.parking.busy) == ([], [], False)


async def test_a_flood_is_read_at_its_pace_and_no_further_than_there_is_room(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARKED_A_SECOND_MAX", 10)
    for offset in range(12):
        site.park(offset)
    assert site.log.paused == {(0, PACED)}
    site.parking._read_on()
    assert site.log.paused == {(0, PACED)}
    site.now_s += 1.0
    site.parking._read_on()
    assert site.log.paused == set()

    monkeypatch.setattr(site.parking.lanes, "full", lambda _number, _of, most=PARKED_MAX: most == PARKED_MAX)
    site.park(20)
    assert site.log.paused == {(0, MANY_PARKED)}
    site.now_s += 1.0
    await site.look(0)
    assert site.log.paused == set()
