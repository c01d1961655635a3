"""Events that are too large for a record, on the real broker: written by reference and read as if nothing had happened."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer, RecordTooLarge
from infra.objects import ObjectStore, StoreAway
from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from infra.settings import KafkaSettings
from schemas.codec import Codec, encode
from schemas.errors import HeadraceError, Undecodable
from schemas.events import (
    Attempt,
    ChoiceAnswer,
    Event,
    InferenceAnswered,
    InferenceFailed,
    InferenceRequested,
    InferenceScheduled,
    PayloadStored,
    Reply,
    Sampling,
    TokensGenerated,
    Usage,
)
from schemas.ids import request_id
from schemas.payloads import PayloadUnreadable, key_of
from schemas.reasons import Reason
from schemas.topics import INLINE_MAX_BYTES

MakeTopic = Callable[[KafkaSettings], Awaitable[str]]
TEXT = "x" * (INLINE_MAX_BYTES + 1)


def new_id() -> str:
    return request_id(time.time_ns() // 1_000_000, secrets.token_bytes(10))


@pytest.fixture
async def payloads(tmp_path: Path) -> AsyncIterator[Payloads]:
    payloads = Payloads(FolderStore(tmp_path / "objects"), patience_s=0.5)
    yield payloads
    await payloads.close()


@pytest.fixture
async def producer(kafka: KafkaSettings, payloads: Payloads) -> AsyncIterator[EventProducer]:
    producer = EventProducer(kafka, "test", payloads)
    await producer.start()
    yield producer
    await producer.stop()


def events() -> list[Event]:
    rid = new_id()
    where = (rid, "acme", "m", "1", "interactive")
    return [
        InferenceRequested(rid, "m", prompt=TEXT),
        InferenceScheduled(*where, tuple(range(900_000)), Sampling(), 1, 2, Reply("tokens", 0), "salt"),
        TokensGenerated(rid, 0, Attempt(1, 1), 0, (1,), TEXT),
        InferenceAnswered(*where, (ChoiceAnswer(0, (1,), TEXT, "stop"),), Usage(1, 1)),
    ]


async def read_one(kafka: KafkaSettings, topic: str, count: int) -> list[bytes]:
    consumer = make_consumer(kafka, topic)
    await consumer.start()
    values = [(await asyncio.wait_for(consumer.getone(), 20)).value for _ in range(count)]
    await consumer.stop()
    return values


async def test_large_events_go_by_reference_and_come_back(
    kafka: KafkaSettings, payloads: Payloads, producer: EventProducer, topic_of: MakeTopic
) -> None:
    topic, sent = await topic_of(kafka), events()
    for encoding in ("avro", "json"):
        for event in sent:
            await producer.send_and_wait(topic, event, key="k", encoding=encoding, owner="acme")
    decoder = EventDecoder(kafka, payloads)
    values = await read_one(kafka, topic, 2 * len(sent))
    assert all(len(value) < 2_000 for value in values)
    assert [await decoder.decode(value) for value in values] == sent * 2
    for value in values:
        assert isinstance(await EventDecoder(kafka).decode(value), PayloadStored)
        assert isinstance(await decoder.decode_record(value), PayloadStored)


async def test_the_inline_limit_is_exact(payloads: Payloads, producer: EventProducer) -> None:
    around = len(encode(InferenceRequested(new_id(), "m", prompt="x" * 700_000))) - 700_000
    for beyond, name in ((-1, InferenceRequested), (0, InferenceRequested), (1, PayloadStored)):
        request = InferenceRequested(new_id(), "m", prompt="x" * (INLINE_MAX_BYTES - around + beyond))
        assert len(encode(request)) == INLINE_MAX_BYTES + beyond
        assert type(Codec().decode(await producer.encoded(request, owner="acme"))) is name
    assert len([found async for found in payloads.store.listed("payloads")]) == 1


async def test_what_belongs_to_nobody_or_has_no_store_is_refused_by_its_size(
    kafka: KafkaSettings, producer: EventProducer, topic_of: MakeTopic
) -> None:
    topic = await topic_of(kafka)
    request = InferenceRequested(new_id(), "m", prompt=TEXT * 3)
    with pytest.raises(RecordTooLarge):
        await producer.send_and_wait(topic, request, key="k")
    plain = EventProducer(kafka, "test")
    await plain.start()
    with pytest.raises(RecordTooLarge):
        await plain.send_and_wait(topic, request, key="k", owner="acme")
    await plain.stop()


async def test_what_is_lost_fails_its_stream_and_is_no_request(
    kafka: KafkaSettings, payloads: Payloads, producer: EventProducer
) -> None:
    decoder = EventDecoder(kafka, payloads)
    requested, scheduled, tokens, answered = events()
    values = [await producer.encoded(event, owner="acme") for event in (requested, scheduled, tokens, answered)]
    async for found in payloads.store.listed("payloads"):
        await payloads.store.delete(found.key)
    for value, event in zip(values[:2], (requested, scheduled), strict=True):
        with pytest.raises(PayloadUnreadable) as caught:
            await decoder.decode(value)
        assert caught.value.reason is Reason.PAYLOAD_LOST
        assert not caught.value.retriable
        assert type(caught.value.outline) is type(event)
    failed, kept = [await decoder.decode(value) for value in values[2:]]
    assert isinstance(failed, InferenceFailed)
    assert (failed.reason, failed.attempt) == ("payload_lost", Attempt(1, 1))
    assert isinstance(kept, InferenceAnswered)
    assert (kept.choices, kept.error_reason, kept.usage) == ((), "payload_lost", Usage(1, 1))


async def test_an_object_of_another_request_is_undecodable(
    kafka: KafkaSettings, payloads: Payloads, producer: EventProducer
) -> None:
    value = await producer.encoded(InferenceRequested(new_id(), "m", prompt=TEXT), owner="acme")
    found = Codec().decode(value)
    assert isinstance(found, PayloadStored)
    decoder = EventDecoder(kafka, payloads)
    swapped = PayloadStored(new_id(), "acme", found.event, found.digest, found.size_bytes)
    with pytest.raises(Undecodable, match="another event"):
        await decoder.follow(swapped)


class Away(ObjectStore):
    """A store that is away until `back`: every call is counted."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__("a store")
        self._store: Any = store
        self.back = False
        self.calls = 0

    def _reached(self) -> Any:
        self.calls += 1
        if not self.back:
            raise StoreAway("it is away")
        return self._store

    def _put(self, key: str, body: bytes) -> None:
        self._reached()._put(key, body)

    def _get(self, key: str, bytes_max: int) -> bytes:
        found: bytes = self._reached()._get(key, bytes_max)
        return found

    def _delete(self, key: str) -> None:
        self._reached()._delete(key)

    def _page(self, prefix: str, page: str) -> Any:
        return self._reached()._page(prefix, page)


async def test_a_store_that_is_away_is_waited_for_once(tmp_path: Path) -> None:
    store = Away(FolderStore(tmp_path))
    payloads = Payloads(store, patience_s=0.6)
    request = InferenceRequested(new_id(), "m", prompt="large")
    began_s = time.monotonic()
    outcomes = await asyncio.gather(*(payloads.put(request, None, "acme") for _ in range(10)), return_exceptions=True)
    assert all(isinstance(outcome, StoreAway) for outcome in outcomes)
    assert 0.5 < time.monotonic() - began_s < 5
    calls, began_s = store.calls, time.monotonic()
    for _ in range(20):
        with pytest.raises(StoreAway):
            await payloads.put(request, None, "acme")
    assert store.calls - calls <= 2 + (
        time.monotonic() - began_s
    )  # it is looked for once a second, and all others fail at once
    store.back = True
    await asyncio.sleep(1.05)
    reference = await payloads.put(request, None, "acme")
    assert await payloads.get(reference, Codec()) == request
    store.back = False
    waiting = asyncio.ensure_future(payloads.get(reference, Codec()))  # the next absence is waited for again
    await asyncio.sleep(0.3)
    assert not waiting.done()
    store.back = True
    assert await waiting == request
    store.back = False
    with pytest.raises(PayloadUnreadable) as caught:
        await payloads.get(reference, Codec())
    assert caught.value.reason is Reason.UNAVAILABLE
    await payloads.close()


@pytest.mark.parametrize("changed", [{"digest": "x"}, {"tenant": "../other"}, {"size_bytes": 0}])
async def test_a_reference_that_is_none_is_not_followed(payloads: Payloads, changed: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "request_id": new_id(),
        "tenant": "acme",
        "event": "InferenceRequested",
        "digest": "a" * 64,
        "size_bytes": 5,
    }
    assert key_of(PayloadStored(**good))
    with pytest.raises(HeadraceError):
        await payloads.get(PayloadStored(**(good | changed)), Codec())


async def test_others_get_their_turn_while_millions_of_token_ids_are_packed_and_read(payloads: Payloads) -> None:
    where = (new_id(), "acme", "m", "1", "interactive")
    scheduled = InferenceScheduled(*where, tuple(range(2_000_000)), Sampling(), 1, 2, Reply("tokens", 0), "salt")
    beats, stop = 0, asyncio.Event()

    async def beat() -> None:
        nonlocal beats
        while not stop.is_set():
            await asyncio.sleep(0.005)
            beats += 1

    beating = asyncio.ensure_future(beat())
    reference = await payloads.put(scheduled, None, "acme")
    assert await payloads.get(reference, Codec()) == scheduled
    stop.set()
    await beating
    assert beats > 10
