"""However many come back at once, a partition is read once for all of them, and nobody waits for another."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition

from bridge.replay import poll
from infra.log import EventProducer
from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from infra.settings import KafkaSettings
from schemas.codec import encode_json
from schemas.errors import HeadraceError
from schemas.events import Event
from schemas.reasons import Reason
from schemas.topics import INLINE_MAX_BYTES
from schemas.topics import TOKENS as TOKENS_TOPIC
from tests.bridge.herd import TENANT, Herd, come_back, hear, resuming, writing

HERD = 200
TOKENS = 100
SOON_S = 10.0
WAIT_S = 60.0
PASSES_MAX = 3
"""Of the first who came, of those who came meanwhile, and of what was written meanwhile."""


async def test_a_herd_is_whole_soon_and_its_partition_was_read_for_all_at_once(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    herd = Herd(HERD, TOKENS)
    async with writing(kafka) as producer:
        await herd.begin(producer)
        await herd.go_on(producer)
    async with resuming(kafka, tmp_path) as resumes:
        began_s = time.monotonic()
        texts = await asyncio.gather(*[come_back(resumes, herd, one) for one in herd.ids])
        took_s = time.monotonic() - began_s
        scans = resumes.catching_up
        assert texts == [herd.rest] * HERD
        assert took_s < SOON_S
        assert 1 <= scans.passes <= PASSES_MAX
        assert scans.records <= PASSES_MAX * HERD * (TOKENS + 2)
        assert scans.readers.started <= 2  # one looks for the partition's ends, one reads
        assert len(resumes) == 0


async def test_whoever_comes_while_others_are_served_misses_nothing(kafka: KafkaSettings, tmp_path: Path) -> None:
    herd = Herd(60, 60)

    async def come(i: int, one: str) -> str:
        await asyncio.sleep(i * 0.02)
        return await come_back(resumes, herd, one)

    async with writing(kafka) as producer, resuming(kafka, tmp_path) as resumes:
        await herd.begin(producer)
        *texts, _ = await asyncio.gather(
            *[come(i, one) for i, one in enumerate(herd.ids)], herd.go_on(producer, gap_s=0.02)
        )
    assert texts == [herd.rest] * 60


async def test_who_does_not_read_holds_nobody_and_gets_the_rest_when_it_reads(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    slow, quick = Herd(5, 50, "y" * 4_000), Herd(50, 50)
    async with writing(kafka) as producer:
        for herd in (slow, quick):
            await herd.begin(producer)
        for herd in (slow, quick):
            await herd.go_on(producer)
    async with resuming(kafka, tmp_path, pending_bytes_max=32 * 1024) as resumes:
        waiting = [await resumes.open(TENANT, slow.wish(one), 0.0) for one in slow.ids]
        async with asyncio.timeout(SOON_S):
            texts = await asyncio.gather(*[come_back(resumes, quick, one) for one in quick.ids])
        assert texts == [quick.rest] * 50
        assert not any(resumed.call.done for resumed in waiting)
        async with asyncio.timeout(SOON_S):
            assert await asyncio.gather(*[hear(resumed.call) for resumed in waiting]) == [slow.rest] * 5
        for resumed in waiting:
            resumed.call.release()


class SlowStore(FolderStore):
    """Gives nothing until it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = asyncio.Event()
        self.asked = 0

    async def get(self, *given: Any, **more: Any) -> bytes:
        self.asked += 1
        await self.go.wait()
        return await super().get(*given, **more)


class StoredHerd(Herd):
    """Whose events are too large for records."""

    stored: EventProducer

    async def _send(self, producer: AIOKafkaProducer, event: Event) -> Any:
        return await self.stored.send(TOKENS_TOPIC, event, partition=self.partition, owner=TENANT)


async def test_who_waits_for_the_object_store_holds_nobody_and_gets_each_event_once(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    store = SlowStore(tmp_path / "objects")
    payloads = Payloads(store)
    large, quick = StoredHerd(2, 4, "z" * (INLINE_MAX_BYTES + 1)), Herd(30, 40)
    large.stored = EventProducer(kafka, "test", payloads)
    await large.stored.start()
    async with writing(kafka) as producer:
        for herd in (large, quick):
            await herd.begin(producer)
        for herd in (large, quick):
            await herd.go_on(producer)
    await large.stored.stop()
    async with resuming(kafka, tmp_path, payloads=payloads) as resumes:
        waiting = [await resumes.open(TENANT, large.wish(one), 0.0) for one in large.ids]
        async with asyncio.timeout(WAIT_S):
            while store.asked < len(waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            texts = await asyncio.gather(*[come_back(resumes, quick, one) for one in quick.ids])
        assert texts == [quick.rest] * len(quick.ids)
        assert not any(resumed.call.done for resumed in waiting)
        store.go.set()
        async with asyncio.timeout(WAIT_S):
            heard = await asyncio.gather(*[hear(resumed.call) for resumed in waiting])
        assert [len(text) for text in heard] == [len(large.rest)] * len(waiting)
        assert store.asked == len(waiting) * (large.tokens - 1), "each event once"
        for resumed in waiting:
            resumed.call.release()


async def test_records_of_every_encoding_are_found(kafka: KafkaSettings, tmp_path: Path) -> None:
    herd, other = Herd(3, 20, encoding=encode_json), Herd(3, 20)
    async with writing(kafka) as producer, resuming(kafka, tmp_path) as resumes:
        for one in (herd, other):
            await one.begin(producer)
        for one in (herd, other):
            await one.go_on(producer)
        texts = await asyncio.gather(*[come_back(resumes, herd, one) for one in herd.ids])
    assert texts == [herd.rest] * 3


async def test_consumers_are_kept_for_the_next_and_stopped_when_nobody_comes(
    kafka: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_s = 5.0
    monkeypatch.setattr("bridge.readers.IDLE_S", idle_s)
    herd = Herd(3, 20)
    async with writing(kafka) as producer, resuming(kafka, tmp_path) as resumes:
        await herd.begin(producer)
        await herd.go_on(producer)
        readers = resumes.catching_up.readers
        await come_back(resumes, herd, herd.ids[0])
        started = readers.started
        for one in herd.ids[1:]:
            await come_back(resumes, herd, one)
        assert (readers.started, readers.idle > 0) == (started, True)
        await asyncio.sleep(idle_s + 1.0)
        assert readers.idle == 0
        assert await come_back(resumes, herd, herd.ids[0]) == herd.rest
        assert readers.started > started


async def test_all_are_told_when_a_partition_cannot_be_scanned_and_may_come_back(
    kafka: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    herd = Herd(20, 20)
    broken: list[AIOKafkaConsumer] = []
    all_wait = asyncio.Event()

    async def breaks(consumer: AIOKafkaConsumer, partition: TopicPartition) -> list[ConsumerRecord]:
        if not broken:
            await all_wait.wait()
            broken.append(consumer)
            await consumer.stop()
        return await poll(consumer, partition)

    async def fails(call: Any) -> Reason:
        with pytest.raises(HeadraceError) as caught:
            await hear(call)
        return caught.value.reason

    async with writing(kafka) as producer, resuming(kafka, tmp_path) as resumes:
        await herd.begin(producer)
        await herd.go_on(producer)
        monkeypatch.setattr("bridge.catching_up.poll", breaks)
        opened = await asyncio.gather(*[resumes.open(TENANT, herd.wish(one), 0.0) for one in herd.ids])
        all_wait.set()
        reasons = await asyncio.gather(*[fails(resumed.call) for resumed in opened])
        assert set(reasons) == {Reason.UNAVAILABLE}
        for resumed in opened:
            resumed.call.release()
        texts = await asyncio.gather(*[come_back(resumes, herd, one) for one in herd.ids])
        assert texts == [herd.rest] * 20


async def test_who_leaves_meanwhile_is_no_longer_fed_and_the_front_door_may_stop(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    herd = Herd(20, 50)
    async with writing(kafka) as producer:
        await herd.begin(producer)
        await herd.go_on(producer)
    async with resuming(kafka, tmp_path) as resumes:
        opened = await asyncio.gather(*[resumes.open(TENANT, herd.wish(one), 0.0) for one in herd.ids])
        for resumed in opened[:10]:
            resumed.call.release()
        assert await asyncio.gather(*[hear(resumed.call) for resumed in opened[10:15]]) == [herd.rest] * 5
        assert len(resumes) == 10
    assert len(resumes) == 0
