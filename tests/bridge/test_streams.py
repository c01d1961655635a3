"""An event that is in the object store holds back its own request's records, and no other's."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from bridge import streams
from bridge.streams import Dispatcher
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.events import Attempt, Event, PayloadStored, TokensGenerated
from schemas.ids import request_id

ATTEMPT = Attempt(1, 1)


class Store:
    """Gives `tokens` of a reference when it is told to."""

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[Event]] = {}

    async def get(self, reference: PayloadStored, _codec: Any) -> Event:
        self.asked[reference.digest] = asyncio.get_running_loop().create_future()
        return await self.asked[reference.digest]


class Reader:
    """A dispatcher without its consumer, and what each request's leg was fed."""

    def __init__(self, *requests: str) -> None:
        self.store = Store()
        store: Any = self.store
        self.dispatcher = Dispatcher(KafkaSettings(), 0, EventDecoder(KafkaSettings(), store))
        self.fed: dict[str, list[tuple[int, int]]] = {name: [] for name in requests}
        for name in requests:
            leg: Any = SimpleNamespace(request_id=name, call=SimpleNamespace(feed=self.feed, fail=self.fail))
            self.dispatcher.register(leg)
        self.failed = 0

    def feed(self, leg: Any, event: Any, _partition: int, offset: int) -> None:
        self.fed[leg.request_id].append((offset, event.first))

    def fail(self, _error: Exception) -> None:
        self.failed += 1

    async def read(self, event: Event, offset: int) -> None:
        await self.dispatcher._hand_on(encode(event), offset)
        await asyncio.sleep(0)


def new(number: int) -> str:
    return request_id(1_700_000_000_000, number.to_bytes(10, "big"))


def tokens(name: str, first: int) -> TokensGenerated:
    return TokensGenerated(name, 0, ATTEMPT, first, (1,), "x")


def reference(name: str, first: int) -> PayloadStored:
    return PayloadStored(name, "acme", "TokensGenerated", f"{name}-{first}", 1_000_000)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_others_go_on_and_its_own_records_keep_their_order() -> None:
    slow, other, gone = new(1), new(2), new(3)
    reader = Reader(slow, other)
    await reader.read(tokens(slow, 0), 0)
    await reader.read(reference(slow, 1), 1)
    await reader.read(tokens(slow, 2), 2)
    await reader.read(reference(gone, 0), 3)
    await reader.read(reference(slow, 3), 4)
    await reader.read(tokens(other, 0), 5)
    await reader.read(tokens(slow, 4), 6)
    assert reader.fed == {slow: [(0, 0)], other: [(5, 0)]}
    assert list(reader.store.asked) == [f"{slow}-1"]
    reader.store.asked[f"{slow}-1"].set_result(tokens(slow, 1))
    await settle()
    assert reader.fed[slow] == [(0, 0), (1, 1), (2, 2)]
    reader.store.asked[f"{slow}-3"].set_result(tokens(slow, 3))
    await settle()
    assert reader.fed[slow] == [(0, 0), (1, 1), (2, 2), (4, 3), (6, 4)]
    await reader.read(tokens(slow, 5), 7)
    assert reader.fed[slow][-1] == (7, 5)
    assert not reader.dispatcher._fetching


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_first_each_request_has_all_of_its_records_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FETCHES_MAX", 2)
    monkeypatch.setattr(streams, "HELD_MAX", 3)
    chance = random.Random(seed)
    names = [new(number) for number in range(5)]
    reader = Reader(*names)
    counts = dict.fromkeys(names, 0)
    log: list[Event] = []
    for _ in range(80):
        name = chance.choice(names)
        log.append(reference(name, counts[name]) if chance.random() < 0.3 else tokens(name, counts[name]))
        counts[name] += 1

    async def read() -> None:
        for offset, event in enumerate(log):
            await reader.read(event, offset)

    reading = asyncio.create_task(read())
    while not reading.done() or reader.dispatcher._fetching:
        await settle()
        assert len(reader.dispatcher._fetching) <= 2
        pending = [digest for digest, answer in reader.store.asked.items() if not answer.done()]
        if pending and (chance.random() < 0.5 or not reading.done()):
            digest = chance.choice(pending)
            name, _, first = digest.rpartition("-")
            reader.store.asked[digest].set_result(tokens(name, int(first)))
    await reading
    for name in names:
        assert [first for _, first in reader.fed[name]] == list(range(counts[name]))


async def test_a_fetch_that_breaks_fails_its_request_alone() -> None:
    slow, other = new(1), new(2)
    reader = Reader(slow, other)
    await reader.read(reference(slow, 0), 0)
    reader.store.asked[f"{slow}-0"].set_exception(LookupError("a bug"))
    await settle()
    assert reader.failed == 1
    await reader.read(tokens(other, 0), 1)
    assert reader.fed[other] == [(1, 0)]
