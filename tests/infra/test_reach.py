"""A process waits for the log with clear words, gives up where it is refused, and knows later whether the log still answers."""

from __future__ import annotations

import asyncio
import time

from infra import log as log_module
from infra import reach
from infra.broker import EmbeddedKafka
from infra.log import EventProducer
from infra.ports import free_port
from infra.reach import until_reached
from infra.settings import KafkaSettings
from infra.topics import ensure, ensure_core
from schemas.topics import TopicSpec

WAIT_S = 60.0


async def test_it_waits_for_the_cluster_then_for_the_topics(spare_broker: EmbeddedKafka, monkeypatch):
    monkeypatch.setattr(reach, "LOOK_AGAIN_S", 0.1)
    settings, told = spare_broker.settings, list[str]()
    await asyncio.to_thread(spare_broker.stop)
    waiting = asyncio.create_task(until_reached(settings, ["some", "other"], asyncio.Event(), told.append))
    await _until(lambda: any(f"{settings.bootstrap} can't be reached" in words for words in told))
    await asyncio.to_thread(spare_broker.start)
    await _until(lambda: "has no other, some (run `headrace topics ensure`)" in told[-1])
    await ensure(settings, [TopicSpec("some", 1, "id")])
    await _until(lambda: "has no other (run" in told[-1])
    assert not waiting.done()
    await ensure(settings, [TopicSpec("other", 1, "id")])
    assert await asyncio.wait_for(waiting, WAIT_S)


async def test_a_frozen_broker_refuses_nobody(spare_broker: EmbeddedKafka, monkeypatch):
    monkeypatch.setattr(reach, "ANSWER_WAIT_S", 0.5)
    told: list[str] = []
    spare_broker.pause()
    try:
        waiting = asyncio.create_task(until_reached(spare_broker.settings, [], asyncio.Event(), told.append))
        await _until(lambda: len(told) >= reach.REFUSALS_MAX + 1)
        assert set(told) == {f"Kafka at {spare_broker.bootstrap} doesn't answer"}
    finally:
        spare_broker.resume()
    assert await asyncio.wait_for(waiting, WAIT_S)


async def test_a_wait_ends_when_the_process_is_told_to():
    stop = asyncio.Event()
    waiting = asyncio.create_task(until_reached(KafkaSettings(f"127.0.0.1:{free_port()}"), [], stop, lambda _: None))
    await asyncio.sleep(0.2)
    stop.set()
    assert not await asyncio.wait_for(waiting, WAIT_S)


async def test_a_producer_knows_without_sending_whether_the_log_answers(spare_broker: EmbeddedKafka):
    await ensure_core(spare_broker.settings)
    producer = EventProducer(spare_broker.settings, "test")
    await producer.start()
    try:
        for hurt, heal in ((spare_broker.pause, spare_broker.resume), (spare_broker.kill, spare_broker.start)):
            assert producer.failure is None
            await asyncio.to_thread(hurt)
            try:
                await _until(lambda: producer.failure == f"Kafka at {spare_broker.bootstrap} doesn't answer")
            finally:
                await asyncio.to_thread(heal)
            await _until(lambda: producer.failure is None)
    finally:
        await producer.stop()


async def test_a_producer_whose_replacement_was_given_up_is_replaced_all_the_same(
    spare_broker: EmbeddedKafka, monkeypatch
):
    monkeypatch.setattr(log_module, "REBUILD_TRIES_MAX", 1)
    await ensure_core(spare_broker.settings)
    producer = EventProducer(spare_broker.settings, "test")
    await producer.start()
    try:
        await asyncio.to_thread(spare_broker.kill)
        producer._ready.clear()  # as after a failed delivery
        producer._begin_rebuilding()
        await _until(lambda: producer._rebuilding is not None and producer._rebuilding.done())
        assert producer.failure is not None
        await asyncio.to_thread(spare_broker.start)
        await _until(lambda: producer.failure is None)  # nobody sends meanwhile
    finally:
        await producer.stop()


async def _until(condition) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        await asyncio.sleep(0.05)
