"""What no client can read at a partition's end leaves no lag: every group of ours commits past it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from aiokafka import TopicPartition
from aiokafka.producer import message_accumulator

from infra.broker import EmbeddedKafka
from infra.kafka import make_admin, make_consumer, make_producer, partitions_of
from infra.settings import KafkaSettings, WorkerSettings
from infra.topics import ensure, ensure_core
from schemas.topics import DOORS, LIFECYCLE, TOKENS, TopicSpec, requests_topic
from streams import dead_letters, deadlines, endings
from tests.infra.test_foreign_names import NAME, ForeignBuilder
from tests.streams.site import Agent, Site
from workers.group import Group, Held

WAIT_S = 40.0
INTERACTIVE = requests_topic("interactive")
END = Callable[[KafkaSettings, TopicPartition], Awaitable[None]]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """A broker of its own: nothing that another test left open holds a commit back."""
    with EmbeddedKafka(tmp_path_factory.mktemp("kafka")) as broker:
        asyncio.run(ensure_core(broker.settings))
        yield broker.settings


async def foreign(kafka: KafkaSettings, place: TopicPartition) -> None:
    """A batch whose header's name is no UTF-8, and which no client here reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_accumulator, "DefaultRecordBatchBuilder", ForeignBuilder)
        async with make_producer(kafka, enable_idempotence=False) as producer:
            batch = producer.create_batch()
            for number in range(3):
                headers = [] if number else [(NAME, b"x")]
                batch.append(key=b"k", value=str(number).encode(), timestamp=None, headers=headers)
            batch.close()
            await (await producer.send_batch(batch, place.topic, partition=place.partition))


async def marker(kafka: KafkaSettings, place: TopicPartition) -> None:
    """A transaction's end, behind a record that is no event."""
    async with make_producer(kafka, transactional_id=uuid.uuid4().hex) as producer, producer.transaction():
        await producer.send_and_wait(place.topic, b"\xff\x00", b"k", place.partition)


async def plain(kafka: KafkaSettings, place: TopicPartition) -> None:
    """A record that is no event."""
    async with make_producer(kafka) as producer:
        await producer.send_and_wait(place.topic, b"\xff\x00", b"k", place.partition)


async def lag_of(kafka: KafkaSettings, group: str, place: TopicPartition) -> int:
    consumer, admin = make_consumer(kafka), make_admin(kafka)
    await asyncio.gather(consumer.start(), admin.start())
    try:
        await partitions_of(consumer, place.topic)
        end = (await consumer.end_offsets([place]))[place]
        committed = (await admin.list_consumer_group_offsets(group)).get(place)
        return int(end) - (committed.offset if committed is not None else 0)
    finally:
        await asyncio.gather(consumer.stop(), admin.close())


async def until_no_lag(kafka: KafkaSettings, group: str, place: TopicPartition) -> None:
    loop = asyncio.get_running_loop()
    limit_s = loop.time() + WAIT_S
    while (lag := await lag_of(kafka, group, place)) != 0:
        assert lag > 0, "committed beyond the end"
        assert loop.time() < limit_s, f"{group} has a lag of {lag} on {place}"
        await asyncio.sleep(0.2)


ENDS = [(foreign,), (plain, foreign), (marker,), (foreign, plain, marker, foreign)]
GROUPS = [
    ("admission", "admission.interactive", INTERACTIVE),
    ("endings", endings.GROUP, TOKENS),
    ("lifecycle", deadlines.GROUP, LIFECYCLE),
    ("lifecycle", dead_letters.GROUP, DOORS),
]


@pytest.mark.parametrize(("name", "group", "topic"), GROUPS, ids=[group for _, group, _ in GROUPS])
async def test_its_lag_comes_to_nothing(
    kafka: KafkaSettings, request: pytest.FixtureRequest, name: str, group: str, topic: str
) -> None:
    request.getfixturevalue(name)
    places = [TopicPartition(topic, number) for number in range(len(ENDS))]
    if topic == DOORS:
        places = [TopicPartition(topic, 0)] * len(ENDS)
    for place, ends in zip(places, ENDS, strict=True):
        for end in ends:
            await end(kafka, place)
        if topic == DOORS:
            await until_no_lag(kafka, group, place)
    for place in places:
        await until_no_lag(kafka, group, place)


async def test_admission_goes_on_where_it_was_and_reads_what_follows(
    kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory, admission: Agent, site: Site
) -> None:
    """Once committed, the end is passed for whoever comes next; what follows it is decided, and leaves no lag either."""
    for number in range(4):
        place = TopicPartition(INTERACTIVE, number)
        await foreign(kafka, place)
        await until_no_lag(kafka, "admission.interactive", place)
    admission.kill()
    admission.start()
    for number in range(4):
        place = TopicPartition(INTERACTIVE, number)
        await foreign(kafka, place)
        await site.buried(await site.send(b"\xff\x00", partition=number))
        await foreign(kafka, place)
        await until_no_lag(kafka, "admission.interactive", place)


@pytest.fixture
async def group(kafka: KafkaSettings) -> AsyncIterator[tuple[Group, str, TopicPartition]]:
    """A worker's membership in a group of its own."""

    class Owner:
        async def release(self) -> None: ...

        async def assigned(self, lost: list[Held]) -> None: ...

    name = f"test-{uuid.uuid4().hex[:8]}"
    await ensure(kafka, [TopicSpec(name, 1, "id")])
    found = Group(WorkerSettings(kafka=kafka), name, [name], 8, Owner())
    await found.start()
    yield found, name, TopicPartition(name, 0)
    await found.stop()


@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: "-".join(end.__name__ for end in ends))
async def test_a_workers_lag_too(
    kafka: KafkaSettings, group: tuple[Group, str, TopicPartition], ends: tuple[END, ...]
) -> None:
    member, name, place = group

    async def work() -> None:
        while True:
            for held, record in await member.fetch():
                member.finish(held, record.offset)
            await member.commit()

    working = asyncio.create_task(work())
    try:
        for end in ends * 3:  # more than a window
            await end(kafka, place)
        await until_no_lag(kafka, name, place)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
