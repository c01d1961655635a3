"""Who sends records in groups waits a moment for the rest of a group; who sends one at a time waits for nothing; nothing is lost or turned round."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.producer import message_accumulator

from infra.gathering import GATHER_S, GROUP, Gathering
from infra.log import EventProducer
from infra.read import read_to_end
from infra.settings import KafkaSettings
from schemas.codec import Codec
from schemas.events import InferenceCancelled

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)
FULL_BYTES = 10_000
WHOLE_S = GATHER_S + 1e-6  # whatever rounding does


class Bench:
    """Records into a gathering and batches out of it, by a clock that is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(
            message_accumulator, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: 1.0)
        )
        cluster = SimpleNamespace(leader_for_partition=lambda _place: 1)
        self.gathering = Gathering(cluster, FULL_BYTES, 0, 30.0)

    async def put(self, place: TopicPartition, count: int = 1, size: int = 10) -> None:
        for _ in range(count):
            await self.gathering.add_message(place, None, b"x" * size, 1.0)

    def goes(self, muted: frozenset[TopicPartition] = frozenset()) -> dict[TopicPartition, int]:
        """The records that go now, by partition."""
        nodes, _unknown = self.gathering.drain_by_nodes(set(), muted)
        gone = nodes.get(1, {})
        for batch in gone.values():
            batch.done_noack()
        return {place: batch.record_count for place, batch in gone.items()}

    async def groups(self, count: int, size: int) -> None:
        """As if so many groups had gone."""
        for _ in range(count):
            await self.put(ONE, size)
            self.now_s += WHOLE_S
            assert self.goes() == {ONE: size}


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_one_at_a_time_waits_for_nothing(bench: Bench) -> None:
    for _ in range(100):
        await bench.put(ONE)
        assert bench.goes() == {ONE: 1}


async def test_after_groups_the_first_waits_for_the_rest(bench: Bench) -> None:
    await bench.groups(20, 12)
    await bench.put(ONE)
    assert bench.goes() == {}
    await bench.put(ONE, 11)
    bench.now_s += WHOLE_S / 2
    assert bench.goes() == {}
    bench.now_s += WHOLE_S / 2
    assert bench.goes() == {ONE: 12}


async def test_few_and_seldom_waits_for_nothing_again(bench: Bench) -> None:
    await bench.groups(20, 12)
    waited = 0
    for _ in range(40):
        await bench.put(ONE)
        if bench.goes() == {}:
            waited += 1
            bench.now_s += WHOLE_S
            assert bench.goes() == {ONE: 1}
    assert 0 < waited < 20


async def test_what_is_smaller_than_a_group_waits_for_nothing(bench: Bench) -> None:
    for _ in range(50):
        await bench.put(ONE, int(GROUP) - 1)
        assert bench.goes() == {ONE: int(GROUP) - 1}


async def test_who_is_due_takes_the_others_along(bench: Bench) -> None:
    await bench.groups(20, 12)
    await bench.put(ONE, 3)
    bench.now_s += WHOLE_S * 0.9
    await bench.put(TWO, 2)
    assert bench.goes() == {}
    bench.now_s += WHOLE_S * 0.1 + 1e-6
    assert bench.goes() == {ONE: 3, TWO: 2}


async def test_who_can_not_go_takes_nobody_along(bench: Bench) -> None:
    await bench.groups(20, 12)
    await bench.put(ONE)
    bench.now_s += WHOLE_S
    await bench.put(TWO)
    assert bench.goes(frozenset([ONE])) == {}
    assert bench.goes() == {ONE: 1, TWO: 1}


async def test_a_full_batch_goes_at_once(bench: Bench) -> None:
    await bench.groups(20, 12)
    await bench.put(ONE, 9, size=1_000)
    assert bench.goes() == {}
    rest = asyncio.create_task(bench.put(ONE, size=2_000))
    await asyncio.sleep(0)
    assert bench.goes() == {ONE: 9}
    await rest


async def test_who_waits_is_woken(bench: Bench) -> None:
    await bench.groups(20, 12)
    await bench.put(ONE)
    assert bench.goes() == {}
    await asyncio.wait_for(bench.gathering.waiter(), 10)
    bench.now_s += WHOLE_S
    assert bench.goes() == {ONE: 1}


async def test_groups_that_come_little_by_little_travel_whole_and_in_order(
    kafka: KafkaSettings, topic_of: Any, produced: list[str]
) -> None:
    topic = str(await topic_of(kafka))
    events = [[InferenceCancelled(f"{group}.{number}", "t") for number in range(12)] for group in range(30)]
    counts: dict[bool, int] = {}
    for gather in (False, True):
        producer = EventProducer(kafka, "test", gather=gather)
        await producer.start()
        await producer.require(topic, 1)
        produced.clear()
        for group in events:
            sent = []
            for event in group:
                sent.append(await producer.send(topic, event, partition=1))
                await asyncio.sleep(0)
            await asyncio.gather(*sent)
        counts[gather] = len(produced)
        await producer.stop()
        assert producer.outstanding == 0
    assert counts[True] < counts[False]
    codec = Codec()
    found = [codec.decode(record.value) async for record in read_to_end(kafka, topic)]
    assert found == [event for group in events for event in group] * 2
