"""Views catch up, follow, survive bad records and an outage; directories answer from them."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from functools import partial

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from infra.broker import EmbeddedKafka
from infra.directory import ModelDirectory, TenantDirectory, WorkerDirectory
from infra.log import EventProducer
from infra.settings import KafkaSettings
from infra.views import View
from schemas.errors import HeadraceError
from schemas.events import (
    ApiKey,
    Event,
    InferenceCancelled,
    ModelPromoted,
    ModelVersionRegistered,
    TenantChanged,
    WorkerReported,
)
from schemas.topics import REGISTRY, TENANTS, WORKERS

WAIT_S = 20.0


@pytest.fixture
async def topic(kafka: KafkaSettings, topic_of) -> str:
    return str(await topic_of(kafka, compacted=True))


class Seen:
    """Collects what a view applies."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.removed: list[str] = []

    def apply(self, event: Event, _record: ConsumerRecord) -> None:
        assert isinstance(event, InferenceCancelled)
        if event.request_id == "bug":
            raise KeyError(event.request_id)
        self.ids.append(event.request_id)


def cancelled(name: str) -> InferenceCancelled:
    return InferenceCancelled(name, "t")


async def test_a_view_catches_up_then_follows(kafka: KafkaSettings, producer: EventProducer, topic: str):
    for number in range(20):
        await producer.send_and_wait(topic, cancelled(f"r{number}"), key=f"r{number}", partition=number % 2)
    seen = Seen()
    view = View(kafka, topic, seen.apply, seen.removed.append)

    await view.start()
    caught_up = set(seen.ids)
    await producer.send_and_wait(topic, cancelled("later"), key="k", partition=0)
    await (await producer.send_raw(topic, None, b"k", 0))

    assert caught_up == {f"r{number}" for number in range(20)}
    assert await view.until(lambda: seen.removed == ["k"], WAIT_S)
    assert seen.ids[-1] == "later"
    assert not await view.until(lambda: False, 0.05)
    await view.stop()
    await view.stop()


async def test_what_stands_in_the_topic_at_the_call_is_applied_once_it_is_caught_up(
    kafka: KafkaSettings, producer: EventProducer, topic: str
):
    seen = Seen()
    view = View(kafka, topic, seen.apply)
    await view.start()

    async def tell(name: str) -> bool:
        await producer.send_and_wait(topic, cancelled(name), key=name)
        return await view.caught_up() and name in seen.ids

    found = [await asyncio.gather(*(tell(f"{turn}-{number}") for number in range(20))) for turn in range(5)]

    assert all(map(all, found))
    await view.stop()


async def test_who_asks_for_what_was_told_since_a_look_began_gets_the_next_look(
    kafka: KafkaSettings, producer: EventProducer, topic: str, monkeypatch: pytest.MonkeyPatch
):
    view = View(kafka, topic, Seen().apply)
    await view.start()
    asked: list[int] = []
    ends_of = AIOKafkaConsumer.end_offsets

    async def end_offsets(consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        asked.append(len(partitions))
        ends: dict[TopicPartition, int] = await ends_of(consumer, partitions)
        return ends

    monkeypatch.setattr(AIOKafkaConsumer, "end_offsets", end_offsets)
    first = asyncio.create_task(view.caught_up())
    await view.until(lambda: False, 0)  # the first look is on its way
    others = [asyncio.create_task(view.caught_up()) for _ in range(100)]

    assert await first and all(await asyncio.gather(*others))
    assert len(asked) <= 2
    await view.stop()


async def test_a_view_that_is_stopped_or_can_not_read_is_not_caught_up(
    kafka: KafkaSettings, topic: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("infra.views.LOOK_S_MAX", 0.2)
    view = View(kafka, topic, Seen().apply)
    assert not await view.caught_up()
    await view.start()
    assert await view.caught_up()

    async def never(_consumer: AIOKafkaConsumer, _partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        await asyncio.sleep(WAIT_S)
        return {}

    monkeypatch.setattr(AIOKafkaConsumer, "end_offsets", never)
    assert not await view.caught_up()
    monkeypatch.setattr("infra.views.LOOK_S_MAX", WAIT_S)
    other = View(kafka, topic, Seen().apply)
    await other.start()
    asking = [asyncio.create_task(other.caught_up()) for _ in range(3)]
    await other.until(lambda: False, 0.1)
    asking[0].cancel()
    await other.stop()
    assert [await one for one in asking[1:]] == [False, False], "it was stopped meanwhile"
    monkeypatch.undo()
    assert await view.caught_up()
    await view.stop()
    assert not await view.caught_up()


async def test_an_empty_topic_is_caught_up_at_once(kafka: KafkaSettings, topic: str):
    view = View(kafka, topic, Seen().apply)
    await view.start()
    await view.stop()


async def test_bad_records_are_counted_and_passed_over(kafka: KafkaSettings, producer: EventProducer, topic: str):
    unknown_schema = b"\xc3\x01" + b"\x01" * 12
    for junk in (b"\xff\x00", b"{", unknown_schema, b""):
        await (await producer.send_raw(topic, junk, b"k", 0))
    await producer.send_and_wait(topic, cancelled("bug"), key="k", partition=0)
    await (await producer.send_raw(topic, None, b"\xff", 0))
    await producer.send_and_wait(topic, cancelled("good"), key="k", partition=0)
    seen = Seen()
    view = View(kafka, topic, seen.apply, seen.removed.append)

    await view.start()
    await view.stop()

    assert seen.ids == ["good"]
    assert view.bad_records == 6
    assert view.failure is None


async def test_a_missing_topic_is_named(kafka: KafkaSettings):
    with pytest.raises(HeadraceError, match="the topic nowhere doesn't exist"):
        await View(kafka, "nowhere", Seen().apply).start()


async def test_a_view_outlives_its_broker(spare_broker: EmbeddedKafka, topic_of):
    settings = spare_broker.settings
    topic = await topic_of(settings)
    producer = EventProducer(settings, "test")
    await producer.start()
    await producer.send_and_wait(topic, cancelled("before"), key="k")
    seen = Seen()
    view = View(settings, topic, seen.apply)
    await view.start()

    await asyncio.to_thread(spare_broker.kill)
    await asyncio.to_thread(spare_broker.start)
    await asyncio.wait_for(producer.send_and_wait(topic, cancelled("after"), key="k"), 60)

    assert await view.until(lambda: "after" in seen.ids, 60)
    assert seen.ids == ["before", "after"]
    await view.stop()
    await producer.stop()


def tenant(name: str, *keys: ApiKey) -> TenantChanged:
    return TenantChanged(name, "salt", keys, 1)


async def test_tenants_by_name_and_key_and_a_revocation(kafka: KafkaSettings, producer: EventProducer):
    name, sha = uuid.uuid4().hex, uuid.uuid4().hex
    key, other = ApiKey("k1", sha, ("interactive",), 1), ApiKey("k2", sha + "x", ("batch",), 1)
    await producer.send_and_wait(TENANTS, tenant(name, key, other), key=name)
    directory = TenantDirectory(kafka)
    await directory.start()

    assert directory.tenant(name) == tenant(name, key, other)
    assert directory.by_key_hash(sha) == (tenant(name, key, other), key)
    assert directory.by_key_hash("none") is None

    revoked = ApiKey("k1", sha, ("interactive",), 1, revoked_ms=2)
    await producer.send_and_wait(TENANTS, tenant(name, revoked), key=name)
    assert await directory.until(lambda: directory.tenant(name) == tenant(name, revoked), WAIT_S)
    assert directory.by_key_hash(sha) == (tenant(name, revoked), revoked)
    assert directory.by_key_hash(sha + "x") is None  # the key that is no longer listed

    await (await producer.send_raw(TENANTS, None, name.encode()))
    assert await directory.until(lambda: directory.tenant(name) is None, WAIT_S)
    assert directory.by_key_hash(sha) is None
    assert name not in {item.tenant for item in directory.all()}
    await directory.stop()


async def test_a_key_is_revoked_when_that_is_told_though_the_operators_clock_is_ahead(
    kafka: KafkaSettings, producer: EventProducer
):
    name, ahead_ms = uuid.uuid4().hex, int(time.time() * 1000) + 3_600_000
    directory = TenantDirectory(kafka)
    await directory.start()
    revoked = ApiKey("k1", uuid.uuid4().hex, ("interactive",), 1, revoked_ms=ahead_ms)
    told = await producer.send_and_wait(TENANTS, tenant(name, revoked), key=name)
    assert await directory.until(lambda: directory.tenant(name) is not None, WAIT_S)
    assert directory.by_key_hash(revoked.sha256) == (
        tenant(name, replace(revoked, revoked_ms=told.timestamp)),
        replace(revoked, revoked_ms=told.timestamp),
    )
    await directory.stop()


def promoted(directory: ModelDirectory, version: ModelVersionRegistered) -> bool:
    return directory.resolve(version.model) == version


async def test_a_models_name_stands_for_the_version_promoted_last(kafka: KafkaSettings, producer: EventProducer):
    model = uuid.uuid4().hex
    versions = [ModelVersionRegistered(model, str(number), "scripted", "", 10) for number in (1, 2)]
    directory = ModelDirectory(kafka)
    await directory.start()
    for version in versions:
        await producer.send_and_wait(REGISTRY, version, key=model)
    assert await directory.until(lambda: len(directory.versions(model)) == 2, WAIT_S)
    assert directory.resolve(model) is None
    assert model not in {item.model for item in directory.all()}

    for stable in (versions[1], versions[0]):
        await producer.send_and_wait(REGISTRY, ModelPromoted(model, stable.version), key=model)
        assert await directory.until(partial(promoted, directory, stable), WAIT_S)
    assert directory.versions(model) == versions
    assert directory.version(model, "2") == versions[1]
    assert versions[0] in directory.all()
    assert directory.resolve("nobody's") is None
    await directory.stop()


def report(worker_id: str, model: str, state: str = "ready", running: int = 0) -> WorkerReported:
    return WorkerReported(worker_id, model, "1", state, (), 8, running, 0)


async def test_workers_by_their_last_report(kafka: KafkaSettings, producer: EventProducer):
    model, one, two = uuid.uuid4().hex, uuid.uuid4().hex, uuid.uuid4().hex
    for item in (report(one, model), report(two, model), report(one, model, running=3)):
        placed = await producer.send_and_wait(WORKERS, item, key=item.worker_id)
    directory = WorkerDirectory(kafka)
    await directory.start()

    seen = directory.worker(one)
    assert seen is not None
    assert (seen.report.running, seen.seen_ms) == (3, placed.timestamp)
    assert [item.report.worker_id for item in directory.serving(model, "1")] == sorted([one, two])
    assert directory.serving(model, "2") == ()

    await producer.send_and_wait(WORKERS, report(one, model, "stopped"), key=one)
    await (await producer.send_raw(WORKERS, None, two.encode()))
    assert await directory.until(lambda: not directory.serving(model, "1"), WAIT_S)
    await directory.stop()


async def test_a_start_takes_as_long_as_that_of_the_worker_that_began_last(
    kafka: KafkaSettings, producer: EventProducer
) -> None:
    """Whichever of them reported last, and when none is left."""
    model = uuid.uuid4().hex
    earlier = replace(report("earlier", model), started_ms=1_000, start_up_ms=90_000)
    later = replace(report("later", model), started_ms=2_000, start_up_ms=5_000)
    for told in (earlier, later, earlier, replace(later, state="stopped"), replace(earlier, state="stopped")):
        await producer.send_and_wait(WORKERS, told, key=f"{model}-{told.worker_id}")
    directory = WorkerDirectory(kafka)
    await directory.start()

    assert directory.serving(model, "1") == ()
    assert directory.start_up_ms(model, "1") == later.start_up_ms
    assert directory.start_up_ms(model, "2") is None
    await directory.stop()
