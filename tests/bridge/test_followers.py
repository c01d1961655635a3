"""Partitions are followed while somebody needs them, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiokafka import TopicPartition

from bridge.calls import Call
from bridge.catching_up import CatchingUp
from bridge.followers import Followers
from bridge.streams import Dispatcher
from infra.log import EventDecoder, EventProducer
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationStarted,
    InferenceCompleted,
    Timings,
    TokensGenerated,
    Usage,
)
from schemas.ids import request_id
from schemas.reasons import Reason
from schemas.topics import TOKENS

OWN, FOREIGN = 0, 1
PLACE = TopicPartition(TOKENS, FOREIGN)
ATTEMPT = Attempt(1, 1)


@pytest.fixture
async def followers(kafka: KafkaSettings) -> AsyncIterator[Followers]:
    decoder = EventDecoder(kafka)
    own = Dispatcher(kafka, OWN, decoder)
    await own.start()
    found = Followers(kafka, own, decoder)
    yield found
    await found.stop()
    await own.stop()


async def test_all_users_share_a_follower_and_the_last_one_ends_it(followers: Followers) -> None:
    own = await followers.acquire(TopicPartition(TOKENS, OWN))
    assert len(followers) == 0
    found = await asyncio.gather(*[followers.acquire(PLACE) for _ in range(5)])
    assert len(followers) == 1
    assert {id(dispatcher) for dispatcher in found} == {id(found[0])}
    for dispatcher in found[1:]:
        followers.release(dispatcher)
    assert not found[0].ended
    followers.release(found[0])
    assert len(followers) == 0
    followers.release(own)
    await followers.stop()
    assert [found[0].ended, own.ended] == [True, False]


async def test_no_more_partitions_are_followed_than_the_limit(
    followers: Followers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.followers.FOLLOWED_MAX", 1)
    dispatcher = await followers.acquire(PLACE)
    with pytest.raises(HeadraceError) as caught:
        await followers.acquire(TopicPartition(TOKENS, FOREIGN + 1))
    assert caught.value.reason is Reason.OVERLOADED
    followers.release(dispatcher)


async def test_whoever_waits_is_told_when_a_follower_dies(followers: Followers) -> None:
    dispatcher = await followers.acquire(PLACE)
    call = Call(1000, 0.0)
    dispatcher.register(call.add_leg(request_id(1, bytes(10)), 0))
    assert dispatcher._consumer is not None
    await dispatcher._consumer.stop()
    with pytest.raises(HeadraceError) as caught:
        await call.verdict()
    assert caught.value.reason is Reason.UNAVAILABLE
    assert len(followers) == 0
    followers.release(dispatcher)
    assert not (await followers.acquire(PLACE)).ended


async def test_no_record_is_missed_between_reading_back_and_following(
    kafka: KafkaSettings, followers: Followers
) -> None:
    """Many join one stream while it is written as fast as it can be."""
    catching_up = CatchingUp(kafka, EventDecoder(kafka))
    wanted, count = request_id(2, bytes(10)), 3_000
    producer = EventProducer(kafka, "followers-tests")
    await producer.start()
    where = (wanted, "t", "m", "1", "interactive")
    begin = await producer.send_and_wait(TOKENS, GenerationStarted(*where, ATTEMPT, (0,), 1, "w"), partition=FOREIGN)

    async def write() -> None:
        for i in range(count):
            await producer.send(TOKENS, TokensGenerated(wanted, 0, ATTEMPT, i, (i,), "x"), partition=FOREIGN)
            await asyncio.sleep(0)

        ends = (ChoiceEnd(0, count, "stop"),)
        usage = Usage(1, count)
        await producer.send(TOKENS, InferenceCompleted(*where, ATTEMPT, ends, usage, Timings(), "w"), partition=FOREIGN)

    async def join(wait_s: float) -> str:
        await asyncio.sleep(wait_s)
        call = Call(1_000_000, 0.0)
        leg = call.add_leg(wanted, 0)
        dispatcher = await followers.acquire(PLACE)
        catching_up.join(leg, begin.offset, dispatcher)
        text, done = "", False
        while not done:
            await call.wait()
            update = call.take()
            text, done = text + update.deltas[0].text, update.done
        dispatcher.unregister(leg)
        followers.release(dispatcher)
        return text

    async with asyncio.timeout(60):
        *texts, _ = await asyncio.gather(*[join(i * 0.05) for i in range(12)], write())
    await producer.stop()
    await catching_up.stop()
    assert texts == ["x" * count] * 12
