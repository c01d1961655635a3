"""Behind a flood of batch lines in their own partition, others are served, hear in time and can be cancelled; and of the flood each is answered once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.partitioner import DefaultPartitioner

from cli.records import Read
from cli.registry import now_ms
from decisions.stream import NEW, StreamState, fold
from infra.kafka import make_admin, make_consumer, partitions_of
from infra.log import EventProducer
from infra.models_file import ModelEntry
from schemas.events import (
    Event,
    InferenceAdmitted,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    StreamEvent,
)
from schemas.ids import request_id
from schemas.topics import BATCH, GRANT_HEADER, requests_topic
from tests.system.audit import Mark
from tests.system.fixtures_models import register, worker
from tests.system.running import RunningStack
from tests.system.test_quotas import tenant

pytestmark = pytest.mark.timeout(240)
FLOODED, CLEAR = "flooded", "clear"
LINES = 2_000
AT_ONCE_MAX = 600
"""No more of them than that are held, or were let in."""
SECONDS = 20.0
"""Of a test that says that something takes no more than seconds, on a machine that does other things, too."""
SHORT_MS, LONG_MS = 2_000, 8_000
DONE_S = 120.0
LOOK_S = 0.2
STREAM = (*StreamEvent.__args__, InferenceRejected)


class Lines:
    """A tenant's batch lines, straight to the log."""

    def __init__(self, stack: RunningStack, name: str) -> None:
        self.stack, self.name = stack, name
        given = json.loads(stack.command("tenants", "grant", name, "--tiers", BATCH, "--json").stdout)
        self._headers = ((GRANT_HEADER, given["grant"].encode()),)

    def ask(self, model: str = FLOODED, count: int = 1, **fields: Any) -> list[str]:
        """So many requests: their ids."""
        names = [request_id(now_ms(), os.urandom(10)) for _ in range(count)]
        self._write([InferenceRequested(name, model, prompt="x", **fields) for name in names])
        return names

    def cancel(self, name: str) -> None:
        """It isn't wanted any more."""
        self._write([InferenceCancelled(name)])

    def _write(self, events: list[Event]) -> None:
        async def write() -> None:
            producer = EventProducer(self.stack.kafka, BATCH)
            await producer.start()
            try:
                for event in events:
                    await producer.send(requests_topic(BATCH), event, key=self.name, headers=self._headers)
            finally:
                await producer.stop()

        self.stack.thread.run(write())


class Log:
    """What came into the log since."""

    def __init__(self, stack: RunningStack) -> None:
        self._mark, self._until = Mark(stack, "lifecycle", "tokens."), stack.until

    def records(self, *kinds: type) -> list[Read]:
        """All of these kinds."""
        return [item for item in self._mark.records() if isinstance(item.event, kinds)]

    def first(self, name: str, *kinds: type, wait_s: float = SECONDS) -> Read:
        """A request's first event of a kind, once there is one."""

        def look() -> list[Read]:
            time.sleep(LOOK_S)
            return [item for item in self.records(*kinds) if item.event.request_id == name]  # type: ignore[union-attr]

        found: list[Read] = self._until(look, wait_s)
        return found[0]


def partition(name: str) -> int:
    """Of the batch requests, a tenant's."""
    return int(DefaultPartitioner()(name.encode(), list(range(16)), list(range(16))))


async def is_committed(stack: RunningStack, name: str) -> bool:
    """Whether admission is done with all of a tenant's partition."""
    consumer, admin, topic = make_consumer(stack.kafka), make_admin(stack.kafka), requests_topic(BATCH)
    await asyncio.gather(consumer.start(), admin.start())
    try:
        place = TopicPartition(topic, partition(name) % len(await partitions_of(consumer, topic)))
        ends, offsets = await consumer.end_offsets([place]), await admin.list_consumer_group_offsets("admission.batch")
        return place in offsets and offsets[place].offset >= ends[place]
    finally:
        await asyncio.gather(consumer.stop(), admin.close())


@pytest.fixture(scope="module")
def neighbours(stack: RunningStack) -> tuple[Lines, Lines]:
    """Two tenants whose requests are in one partition, however many partitions of a power of two there are."""
    mine = "flooding"
    other = next(f"beside{number}" for number in range(1_000) if partition(f"beside{number}") == partition(mine))
    for name in (mine, other):
        stack.keys[name] = tenant(stack, name)
    return Lines(stack, mine), Lines(stack, other)


@pytest.fixture
def flooded(stack: RunningStack) -> Iterator[None]:
    """A model without a worker, and one that has its own."""
    register(stack, ModelEntry(FLOODED, "1", "scripted", "scripted", 4096, slots=8, partitions=1))
    register(stack, ModelEntry(CLEAR, "1", "scripted", "scripted", 4096, slots=8, partitions=1))
    with worker(stack, CLEAR, CLEAR):
        yield


def outcomes(log: Log, names: list[str]) -> dict[str, list[str]]:
    """What ended each request's stream, as all its readers fold it."""
    streams: dict[str, StreamState] = {}
    found: dict[str, list[str]] = defaultdict(list)
    for item in log.records(*STREAM):
        if item.topic.startswith("tokens."):
            name = item.event.request_id  # type: ignore[union-attr]
            streams[name], counted = fold(streams.get(name, NEW), item.event)  # type: ignore[arg-type]
            if counted and isinstance(item.event, InferenceCompleted | InferenceFailed | InferenceRejected):
                found[name].append(getattr(item.event, "reason", "completed"))
    return {name: found[name] for name in names}


@pytest.mark.usefixtures("flooded")
def test_behind_a_flood_others_are_served_and_heard_and_of_the_flood_each_is_answered_once(
    stack: RunningStack, neighbours: tuple[Lines, Lines]
) -> None:
    flooding, beside = neighbours
    log = Log(stack)
    flood = flooding.ask(count=LINES)
    last = flooding.ask(timeout_ms=LONG_MS)[0]
    own = flooding.ask(CLEAR)[0]
    late, served = beside.ask(timeout_ms=SHORT_MS)[0], beside.ask()[0]

    # What is behind the flood is read: for another model it is served, and at its deadline it is told.
    assert isinstance(log.first(own, InferenceCompleted).event, InferenceCompleted)
    hears = log.first(late, InferenceFailed, InferenceRejected)
    assert hears.event.reason in ("deadline_exceeded", "no_worker", "overloaded")  # type: ignore[union-attr]
    refused = log.first(last, InferenceRejected)
    assert refused.event.reason == "deadline_exceeded"  # type: ignore[union-attr]
    log.first(served, InferenceAdmitted)
    assert len(log.records(InferenceAdmitted)) < AT_ONCE_MAX

    # A parked line is cancelled, a process with thousands on its hands is killed, and one is cancelled before it has them again.
    unwanted, unread = flood[LINES // 2], flood[-1]
    flooding.cancel(unwanted)
    assert log.first(unwanted, InferenceFailed).event.reason == "cancelled"  # type: ignore[union-attr]
    was = stack.pid("admission-batch")
    stack.kill("admission-batch")
    assert stack.http(flooding.name).delete(f"/v1/streams/{unread}").status_code == HTTPStatus.ACCEPTED
    assert stack.http(beside.name).delete(f"/v1/streams/{unread}").status_code == HTTPStatus.NOT_FOUND
    stack.until_restarted("admission-batch", was)
    assert log.first(unread, InferenceFailed).event.reason == "cancelled"  # type: ignore[union-attr]

    # A worker comes: the other is served at once, and then of the flood each once.
    with worker(stack, FLOODED, FLOODED):
        log.first(served, InferenceCompleted)
        assert len(log.records(InferenceCompleted)) < LINES
        stack.until(lambda: stack.thread.run(is_committed(stack, flooding.name)), DONE_S)
        stack.until(lambda: all(outcomes(log, flood).values()), DONE_S)
    ended = outcomes(log, [*flood, own, late, served, last])
    assert {name: outcome for name, outcome in ended.items() if len(outcome) != 1} == {}
    assert {name for name in flood if ended[name] != ["completed"]} == {unwanted, unread}
    admitted = Counter(item.event.request_id for item in log.records(InferenceAdmitted))  # type: ignore[union-attr]
    assert set(admitted.values()) == {1}
    assert not {unwanted, unread, last} & set(admitted)
