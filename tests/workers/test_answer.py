"""What an answer writes, whatever the broker's pace and however often it pauses, folds to the answer."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decisions.stream import NEW, fold
from infra.log import NotDelivered
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationReleased,
    GenerationStarted,
    InferenceFailed,
    InferenceScheduled,
    Rate,
    Rates,
    Reply,
    Sampling,
    Timings,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.reasons import Reason
from workers.answer import IN_FLIGHT_MAX, PENDING_TOKENS_MAX, RECORD_LOGPROB_TOKENS_MAX, RECORD_TOKENS_MAX, Answer


class Broker:
    """Takes events in order, and confirms each when told, or by itself after a random time."""

    def __init__(self, seed: int | None) -> None:
        self.events: list[Any] = []
        self.open: list[asyncio.Future[Any]] = []
        self._random = None if seed is None else random.Random(seed)

    async def send(self, _topic: str, event: Any, **_more: Any) -> asyncio.Future[Any]:
        if self._random is not None:
            for _ in range(self._random.randrange(3)):
                await asyncio.sleep(0)
        self.events.append(event)
        future = asyncio.get_running_loop().create_future()
        self.open.append(future)
        if self._random is not None:
            asyncio.get_running_loop().call_later(self._random.random() / 1_000, self._confirm, future)
        return future

    @staticmethod
    def _confirm(future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_result(None)


def answer(broker: Broker, *, stream: bool = True, n: int = 1, rates: Rates | None = None) -> Answer:
    work = InferenceScheduled(
        "r", "acme", "m", "1", "interactive", (1, 2), Sampling(n=n), 0, 0, Reply("tokens", 0), "s", stream, rates=rates
    )
    return Answer(broker, work, Attempt(1, 1), "w", ())  # type: ignore[arg-type]


def folded(events: list[Any]) -> tuple[Any, dict[int, list[int]], dict[int, str]]:
    state, ids, texts = NEW, dict[int, list[int]](), dict[int, str]()
    for event in events:
        state, counted = fold(state, event)
        assert counted
        if isinstance(event, TokensGenerated):
            ids.setdefault(event.choice, []).extend(event.token_ids)
            texts[event.choice] = texts.get(event.choice, "") + event.text
    return state, ids, texts


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    releases=st.integers(0, 4),
    stream=st.booleans(),
    n=st.integers(1, 3),
)
def test_any_pace_and_any_releases_give_the_answer(
    seed: int, sizes: list[int], releases: int, stream: bool, n: int
) -> None:
    async def run() -> None:
        broker = Broker(seed)
        made = answer(broker, stream=stream, n=n)
        made.start((0,) * n, 0.0)

        async def produce(choice: int) -> None:
            at = 0
            for size in sizes:
                await made.add(choice, tuple(range(at, at + size)), f"<{at}>", None)
                at += size
                await asyncio.sleep(0)

        async def disturb() -> None:
            for _ in range(releases):
                await asyncio.sleep(0.001)
                await made.release()
                await asyncio.sleep(0.001)
                await made.keep()

        await asyncio.gather(disturb(), *(produce(choice) for choice in range(n)))
        ends = tuple(ChoiceEnd(choice, sum(sizes), "stop") for choice in range(n))
        await made.complete(ends, Usage(2, n * sum(sizes)), Timings())
        made.close()
        assert all(future.done() for future in broker.open)
        state, ids, texts = folded(broker.events)
        assert state.closed is not None and state.closed.outcome == "completed"
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        assert ids == {choice: list(range(sum(sizes))) for choice in range(n)}
        assert texts == {choice: "".join(f"<{at}>" for at in starts) for choice in range(n)}

    asyncio.run(run())


async def test_few_sends_are_in_flight_and_the_rest_is_merged() -> None:
    broker = Broker(None)
    made = answer(broker)
    made.start((0,), 0.0)
    for i in range(100):
        await made.add(0, (i,), "x", None)
    assert len(broker.events) == IN_FLIGHT_MAX
    for future in broker.open:
        future.set_result(None)
    await made.add(0, (100,), "x", None)
    assert broker.events[-1].token_ids == tuple(range(IN_FLIGHT_MAX - 1, 101))


async def test_generation_waits_when_the_broker_does_not_take_it() -> None:
    broker = Broker(None)
    made = answer(broker)
    made.start((0,), 0.0)

    async def produce() -> None:
        for i in range(10_000):
            await made.add(0, (i,), "x", None)

    task = asyncio.create_task(produce())
    await asyncio.sleep(0.05)
    assert not task.done()
    assert made.totals[0] <= PENDING_TOKENS_MAX + IN_FLIGHT_MAX
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("scored", "limit"), [(False, RECORD_TOKENS_MAX), (True, RECORD_LOGPROB_TOKENS_MAX)])
async def test_no_record_holds_more_tokens_than_its_limit(scored: bool, limit: int) -> None:
    broker = Broker(0)
    made = answer(broker, stream=False)
    made.start((0,), 0.0)
    ids = tuple(range(2_000))
    await made.add(0, ids, "text", tuple(TokenLogprob(i, b"", -1.0) for i in ids) if scored else None)
    await made.complete((ChoiceEnd(0, 2_000, "stop"),), Usage(2, 2_000), Timings())
    chunks = [event for event in broker.events if isinstance(event, TokensGenerated)]
    assert max(len(chunk.token_ids) for chunk in chunks) == limit
    assert [chunk.text for chunk in chunks] == [""] * (len(chunks) - 1) + ["text"]
    assert all((chunk.logprobs is not None) == scored for chunk in chunks)
    assert folded(broker.events)[0].closed.outcome == "completed"


async def test_a_failure_tells_what_was_made() -> None:
    broker = Broker(0)
    made = answer(broker, stream=False)
    made.start((3,), 0.0)
    await made.add(0, (9, 9), "", None)
    await made.fail(Reason.ENGINE_ERROR, "why")
    assert isinstance(broker.events[0], GenerationStarted)
    assert isinstance(broker.events[-1], InferenceFailed)
    assert broker.events[-1].totals == (5,)


async def test_a_failed_send_is_raised_by_what_comes_next() -> None:
    broker = Broker(None)
    made = answer(broker)
    made.start((0,), 0.0)
    await made.add(0, (0,), "x", None)
    broker.open[0].set_exception(NotDelivered("gone"))
    with pytest.raises(NotDelivered):
        await made.add(0, (1,), "x", None)
    with pytest.raises(NotDelivered):
        await made.complete((ChoiceEnd(0, 1, "stop"),), Usage(1, 1), Timings())


async def test_a_cancelled_send_loses_and_repeats_nothing() -> None:
    broker = Broker(5)
    made = answer(broker)
    made.start((0,), 0.0)
    for i in range(200):
        task = asyncio.create_task(made.add(0, (i,), f"<{i}>", None))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    total = made.totals[0]
    await made.complete((ChoiceEnd(0, total, "stop"),), Usage(2, total), Timings())
    state, ids, texts = folded(broker.events)
    assert state.closed.outcome == "completed"
    assert texts[0] == "".join(f"<{i}>" for i in ids[0])


async def test_a_start_without_tokens_is_written_soon() -> None:
    broker = Broker(0)
    made = answer(broker)
    made.start((0,), 0.0)
    await asyncio.sleep(0.05)
    assert [type(event) for event in broker.events] == [GenerationStarted]
    await made.release()
    await made.keep()
    await made.complete((ChoiceEnd(0, 0, "stop"),), Usage(2, 0), Timings())
    assert folded(broker.events)[0].closed.outcome == "completed"


@pytest.mark.parametrize("from_tokens", [(0, 0), (0, 1)])
async def test_only_the_first_start_of_a_request_tells_what_its_tenant_had_left(from_tokens: tuple[int, ...]) -> None:
    left = Rates(Rate(9, 8, 7_000))
    broker = Broker(0)
    made = answer(broker, n=2, rates=left)
    made.start(from_tokens, 0.0)
    await made.started()
    await made.release()
    await made.keep()
    starts = [event for event in broker.events if isinstance(event, GenerationStarted)]
    assert [start.rates for start in starts] == [None if any(from_tokens) else left, None]
    made.close()


async def test_what_is_closed_before_it_was_written_stays_unwritten() -> None:
    broker = Broker(0)
    closed = answer(broker)
    closed.start((0,), 0.0)
    closed.close()
    await asyncio.sleep(0.05)
    assert broker.events == []


@pytest.mark.parametrize("started", [False, True])
async def test_what_is_released_before_it_was_written_starts_released(started: bool) -> None:
    broker = Broker(0)
    made = answer(broker)
    if started:
        made.start((0,), 0.0)
    await made.release()
    if not started:
        made.start((0,), 0.0)
    await made.add(0, (7,), "x", None)
    await made.release()
    assert [type(event) for event in broker.events] == [GenerationStarted, GenerationReleased, TokensGenerated]
    state, _, _ = folded(broker.events)
    assert state.released
    await made.hand_over()
    assert len(broker.events) == 3
    made.close()


async def test_a_release_and_its_end_are_told_once_each() -> None:
    broker = Broker(0)
    made = answer(broker)
    made.start((0,), 0.0)
    await made.add(0, (7,), "x", None)
    await made.keep()
    await made.release()
    await made.keep()
    await made.keep()
    state, _, _ = folded(broker.events)
    assert not state.released
    assert [type(event) for event in broker.events[2:]] == [GenerationReleased, GenerationStarted]
    assert broker.events[-1].from_tokens == (1,)
    made.close()
