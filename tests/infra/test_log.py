"""Events reach the log once and in order, and a broken producer is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import cast

import pytest
from aiokafka.errors import KafkaError, OutOfOrderSequenceNumber

from infra import log as log_module
from infra.broker import EmbeddedKafka
from infra.kafka import Producer
from infra.log import EventProducer, NoSuchPartition, NotDelivered, RecordTooLarge
from infra.read import read_to_end
from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.codec import Codec, decode_json, encode, encode_json, own_schemas
from schemas.errors import HeadraceError
from schemas.events import EVENT_TYPES, InferenceCancelled, SchemaPublished
from schemas.topics import RECORD_MAX_BYTES, SCHEMAS, TopicSpec


async def test_records_written_together_stand_together(kafka: KafkaSettings, producer: EventProducer, topic: str):
    groups = [[InferenceCancelled(f"r{group}.{number}", "t") for number in range(9)] for group in range(20)]
    between = [InferenceCancelled(f"alone {number}", "t") for number in range(200)]

    async def together(events: list[InferenceCancelled]) -> int:
        sent = await producer.send_together(topic, events, key="k", partition=1, headers=[("traceparent", b"x")])
        return int((await sent).offset)

    async def alone() -> None:
        await asyncio.gather(*[await producer.send(topic, event, key="a", partition=1) for event in between])

    other = asyncio.create_task(alone())
    offsets = await asyncio.gather(*map(together, groups))
    await other
    records = [record async for record in read_to_end(kafka, topic)]
    codec = Codec()
    for first, group in zip(offsets, groups, strict=True):
        found = [record for record in records if first <= record.offset < first + 9]
        assert [codec.decode(record.value) for record in found] == group
        assert {(record.key, record.headers) for record in found} == {(b"k", (("traceparent", b"x"),))}
    assert len(records) == 20 * 9 + 200
    assert producer.outstanding == 0


async def test_what_is_sent_at_once_to_a_partition_travels_in_one_request(
    kafka: KafkaSettings, producer: EventProducer, topic: str, produced: list[str]
):
    events = [InferenceCancelled(f"{number}" + "x" * 2_000, "t") for number in range(28)]
    first = InferenceCancelled("first", "t")
    # the leader of a new partition may refuse, and be asked again
    await producer.send_and_wait(topic, first, partition=1)
    produced.clear()
    sent = [await producer.send(topic, event, partition=1) for event in events]
    await asyncio.gather(*sent)
    assert len(produced) == 1
    assert await values(kafka, topic) == [encode(event) for event in [first, *events]]


async def test_what_is_too_large_together_is_not_written_at_all(
    producer: EventProducer, topic: str, kafka: KafkaSettings
):
    large = InferenceCancelled("x" * 700_000, "t")
    with pytest.raises(RecordTooLarge):
        await producer.send_together(topic, [large, large, large], key="k", partition=0)
    with pytest.raises(NoSuchPartition):
        await producer.send_together(topic, [large], key="k", partition=99)
    await (await producer.send_together(topic, [large, large], key="k", partition=0, encoding="json"))
    assert await values(kafka, topic) == [encode_json(large)] * 2
    await producer.send_and_wait(topic, large, partition=0)


async def values(settings: KafkaSettings, topic: str) -> list[bytes | None]:
    return [record.value async for record in read_to_end(settings, topic)]


async def test_events_arrive_in_order_with_key_and_headers(kafka: KafkaSettings, producer: EventProducer, topic: str):
    events = [InferenceCancelled(f"r{number}", "t") for number in range(500)]
    futures = [
        await producer.send(topic, event, key="k", partition=1, headers=[("traceparent", b"x")]) for event in events
    ]
    placed = await asyncio.gather(*futures)

    records = [record async for record in read_to_end(kafka, topic)]
    codec = Codec()
    assert [codec.decode(record.value) for record in records] == events
    assert {(record.partition, record.key, record.headers) for record in records} == {
        (1, b"k", (("traceparent", b"x"),))
    }
    assert [place.offset for place in placed] == list(range(500))
    assert placed[0].timestamp == records[0].timestamp
    assert producer.outstanding == 0


async def test_json_and_raw_records_and_tombstones(kafka: KafkaSettings, producer: EventProducer, topic: str):
    event = InferenceCancelled("r", "t")
    await producer.send_and_wait(topic, event, partition=0, encoding="json")
    await (await producer.send_raw(topic, None, b"gone", 0))

    first, second = await values(kafka, topic)
    assert first is not None
    assert decode_json(first) == event
    assert second is None
    with pytest.raises(HeadraceError):
        await producer.send_raw(topic, None)


async def test_its_schemas_are_in_the_log_once(kafka: KafkaSettings, producer: EventProducer):
    again = EventProducer(kafka, "another")
    await again.start()
    await again.stop()

    published = [decode_json(value) for value in await values(kafka, SCHEMAS) if value is not None]
    names = [event.name for event in published if isinstance(event, SchemaPublished)]
    own = [event for event in published if isinstance(event, SchemaPublished) and event.name in own_schemas()]
    assert {event.name for event in own} >= {cls.__name__ for cls in EVENT_TYPES}
    assert len({event.fingerprint for event in own}) == len(own)
    assert names


async def test_missing_topics_and_partitions_are_refused(producer: EventProducer, topic: str, monkeypatch):
    monkeypatch.setattr(log_module, "TOPIC_WAIT_S", 0.3)
    event = InferenceCancelled("r", "t")
    with pytest.raises(NoSuchPartition, match="the topic no-such-topic doesn't exist"):
        await producer.send("no-such-topic", event)
    with pytest.raises(NoSuchPartition, match="has no partition 7"):
        await producer.send(topic, event, partition=7)
    assert await producer.send_and_wait(topic, event, partition=1)


async def test_a_topic_that_grew_is_noticed(kafka: KafkaSettings, producer: EventProducer, topic: str):
    event = InferenceCancelled("r", "t")
    await producer.send_and_wait(topic, event, partition=1)
    await ensure(kafka, [TopicSpec(topic, 4, "id")], grow=True)

    async def taken() -> int | None:
        with contextlib.suppress(NoSuchPartition):  # the broker itself may not know yet what its controller has made
            return int((await producer.send_and_wait(topic, event, partition=3)).partition)
        await asyncio.sleep(0.1)
        return None

    async with asyncio.timeout(10):
        while (partition := await taken()) is None:
            pass
    assert partition == 3


async def test_a_missing_topic_takes_none_along_that_is_met_meanwhile(
    kafka: KafkaSettings, producer: EventProducer, topic: str, monkeypatch
):
    """What isn't there is forgotten, or aiokafka would ask for it for ever; what another task is just meeting stays."""
    await producer.require(SCHEMAS, 0)
    inner = producer._producer
    assert inner is not None
    partitions_for, forgotten = inner.partitions_for, asyncio.Event()

    async def late(name: str) -> set[int]:
        found: set[int] = await partitions_for(name)
        if name == topic:
            await forgotten.wait()
        return found

    async def meet_the_missing() -> None:
        with pytest.raises(NoSuchPartition):
            await producer.require("no-such-topic", 0)
        forgotten.set()

    monkeypatch.setattr(inner, "partitions_for", late)
    monkeypatch.setattr(log_module, "TOPIC_WAIT_S", 2.0)
    meeting = asyncio.create_task(producer.require(topic, 1))
    await asyncio.sleep(0)
    monkeypatch.setattr(log_module, "TOPIC_WAIT_S", 0.3)
    await meet_the_missing()
    await meeting
    await inner.client.force_metadata_update()
    assert inner.client.cluster.partitions_for_topic(topic)
    await producer.require(topic, 1)


async def test_a_topic_that_the_client_no_longer_asks_for_is_met_again(producer: EventProducer, topic: str):
    await producer.require(topic, 1)
    inner = producer._producer
    assert inner is not None
    inner.client.set_topics({SCHEMAS})
    await inner.client.force_metadata_update()
    assert inner.client.cluster.partitions_for_topic(topic) is None

    await producer.require(topic, 1)


async def test_the_largest_record_passes_and_one_byte_more_does_not(producer: EventProducer, topic: str):
    size = RECORD_MAX_BYTES
    future = None
    while future is None:
        with contextlib.suppress(RecordTooLarge):
            future = await producer.send_raw(topic, b"x" * size, None, 0)
            break
        size -= 1
    assert size > RECORD_MAX_BYTES - 200
    assert (await future).offset == 0
    with pytest.raises(RecordTooLarge) as caught:
        await producer.send_raw(topic, b"x" * (size + 1), None, 0)
    assert not caught.value.retriable
    assert (await (await producer.send_raw(topic, b"next", None, 0))).offset == 1


async def test_a_record_that_only_the_broker_finds_too_large_is_not_sent_again(
    kafka: KafkaSettings, producer: EventProducer
):
    """Another cluster's limit may be lower. Trying again would fail for ever."""
    topic = f"narrow-{uuid.uuid4().hex[:8]}"
    await ensure(kafka, [TopicSpec(topic, 1, "id", config={"max.message.bytes": "10000"})])
    future = await producer.send_raw(topic, b"x" * 20_000, None, 0)
    with pytest.raises(RecordTooLarge) as caught:
        await future
    assert not caught.value.retriable
    assert (await (await producer.send_raw(topic, b"next", None, 0))).offset == 0


async def test_a_broken_producer_fails_what_was_on_its_way_and_is_replaced(
    kafka: KafkaSettings, producer: EventProducer, topic: str
):
    await (await producer.send_raw(topic, b"before", None, 0))
    broken = producer._producer
    assert broken is not None
    # The next batch of partition 0 claims a place in the sequence that the broker doesn't expect.
    broken._txn_manager._sequence_numbers[(topic, 0)] = 1000  # a named tuple equals the plain one
    bad = await producer.send_raw(topic, b"lost", None, 0)

    with pytest.raises(NotDelivered) as caught:
        await bad

    assert caught.value.retriable
    assert isinstance(caught.value, KafkaError)
    assert (await (await producer.send_raw(topic, b"after", None, 0))).offset == 1
    assert producer._producer is not broken
    assert producer.failure is None
    assert await values(kafka, topic) == [b"before", b"after"]


async def test_records_of_other_partitions_fail_with_it(producer: EventProducer, topic: str):
    inner: list[asyncio.Future[object]] = []

    class Stuck:
        """Takes records and confirms none."""

        _closed = False

        def __init__(self) -> None:
            real = producer._producer
            assert real is not None
            self.client, self._sender, self._real = real.client, real._sender, real

        async def send(self, *_args, **_kwargs) -> asyncio.Future[object]:
            inner.append(asyncio.get_running_loop().create_future())
            return inner[-1]

        put = send

        async def partitions_for(self, _topic: str) -> set[int]:
            return {0, 1}

    await (await producer.send_raw(topic, b"met", None, 0))
    real = producer._producer
    producer._producer = cast(Producer, Stuck())
    first = await producer.send_raw(topic, b"a", None, 0)
    second = await producer.send_raw(topic, b"b", None, 1)
    inner[0].set_exception(OutOfOrderSequenceNumber())
    for future in (first, second):
        with pytest.raises(NotDelivered):
            await future
    assert real is not None
    await producer.send_and_wait(topic, InferenceCancelled("r", "t"))
    inner[1].cancel()
    await real.stop()
    assert producer.outstanding == 0


async def test_a_stopped_producer_says_so(kafka: KafkaSettings, topic: str):
    producer = EventProducer(kafka, "test")
    assert producer.failure
    await producer.start()
    last = await producer.send(topic, InferenceCancelled("r", "t"))
    await producer.stop()
    assert (await last).offset >= 0  # what was buffered is flushed
    with pytest.raises(NotDelivered, match="closed"):
        await producer.send(topic, InferenceCancelled("r", "t"))
    await producer.stop()


async def test_a_cluster_that_is_not_there_is_a_retriable_error():
    with pytest.raises(NotDelivered, match=r"127\.0\.0\.1:1"):
        await EventProducer(KafkaSettings("127.0.0.1:1"), "test").start()


async def test_stopping_does_not_wait_for_a_dead_broker(spare_broker: EmbeddedKafka, topic_of, monkeypatch):
    monkeypatch.setattr(log_module, "FLUSH_WAIT_S", 0.5)
    topic = await topic_of(spare_broker.settings)
    producer = EventProducer(spare_broker.settings, "test")
    await producer.start()
    await (await producer.send_raw(topic, b"1"))
    spare_broker.kill()
    left = await producer.send_raw(topic, b"2")
    await asyncio.wait_for(producer.stop(), 30)
    with pytest.raises(NotDelivered, match="closed"):
        await left


async def test_a_broker_that_comes_back_gets_what_was_sent_meanwhile(spare_broker: EmbeddedKafka, topic_of):
    settings = spare_broker.settings
    topic = await topic_of(settings)
    producer = EventProducer(settings, "test")
    await producer.start()
    first = await (await producer.send_raw(topic, b"1", None, 0))
    await asyncio.to_thread(spare_broker.kill)
    waiting = await producer.send_raw(topic, b"2", None, 0)
    await asyncio.to_thread(spare_broker.start)
    assert (await asyncio.wait_for(waiting, 60)).offset == first.offset + 1
    await producer.stop()
    assert await values(settings, topic) == [b"1", b"2"]
