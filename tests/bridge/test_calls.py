"""A call's state: what is folded in, and what comes out."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.calls import Call, Leg
from bridge.event_ids import Shape
from bridge.openai_chat import ChatRendering
from bridge.streams import peek_request_id
from decisions.stream import Input
from schemas.codec import encode, encode_json
from schemas.errors import HeadraceError
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceAdmitted,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    Position,
    Reply,
    Timings,
    TokensGenerated,
    Usage,
)
from schemas.reasons import Reason

ID = "01890a5d-ac96-774b-bcce-b302099a8057"
OTHER = "01890a5d-ac96-774b-bcce-b302099a8058"
A1, A2 = Attempt(1, 1), Attempt(2, 1)
WHERE = (ID, "t", "m", "v", "interactive")


def started(attempt: Attempt, *counts: int) -> GenerationStarted:
    return GenerationStarted(*WHERE, attempt, counts, 1, "w")


def tokens(attempt: Attempt, first: int, text: str, choice: int = 0) -> TokensGenerated:
    return TokensGenerated(ID, choice, attempt, first, tuple(range(len(text))), text)


def completed(attempt: Attempt, *totals: int, tail: str = "") -> InferenceCompleted:
    ends = tuple(ChoiceEnd(i, total, "stop", text=tail) for i, total in enumerate(totals))
    return InferenceCompleted(*WHERE, attempt, ends, Usage(1, sum(totals)), Timings(), "w")


def feed(call: Call, *events: Input) -> None:
    for offset, event in enumerate(events):
        call.feed(call.legs[0], event, 0, offset)


def place(leg: Leg) -> str:
    return f"{leg.request_id}:{leg.partition}:{leg.offset}"


@pytest.fixture
async def call() -> Call:
    found = Call(1000, 0.0, name=place)
    found.add_leg(ID, 0)
    return found


async def test_a_takeover_goes_on_where_the_tokens_end(call: Call) -> None:
    feed(
        call,
        started(A1, 0),
        tokens(A1, 0, "ab"),
        GenerationTakenOver(*WHERE, A2, "w2"),
        tokens(A1, 2, "LATE"),
        completed(A1, 2),
        started(A2, 2),
        tokens(A2, 2, "cd"),
        completed(A2, 4, tail="!"),
    )
    update = call.take()
    assert (update.deltas[0].text, update.done, update.error) == ("abcd!", True, None)
    assert update.event_id == f"{ID}:0:7"


async def test_a_release_is_no_end(call: Call) -> None:
    feed(call, started(A1, 0), tokens(A1, 0, "a"), GenerationReleased(ID, A1, "w"))
    assert not call.done
    assert not call.legs[0].ended


async def test_nothing_counts_after_the_end(call: Call) -> None:
    feed(call, started(A1, 0), completed(A1, 0), tokens(A1, 0, "x"), InferenceFailed(*WHERE, "cancelled", ""))
    update = call.take()
    assert (update.deltas[0].text, update.error) == ("", None)


async def test_a_count_that_differs_is_a_failure(call: Call) -> None:
    feed(call, started(A1, 0), tokens(A1, 0, "a"), completed(A1, 2))
    with pytest.raises(HeadraceError) as caught:
        await call.verdict()
    assert caught.value.reason is Reason.INCONSISTENT_STREAM


async def test_a_reason_of_a_newer_process_reads_as_internal_error(call: Call) -> None:
    feed(call, InferenceRejected(ID, "t", "m", "interactive", "from_the_future", "why"))
    with pytest.raises(HeadraceError, match="why") as caught:
        await call.verdict()
    assert caught.value.reason is Reason.INTERNAL_ERROR


async def test_headers_wait_a_little_for_the_first_token_after_the_start(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.calls.HEADERS_WAIT_S", 0.01)
    verdict = asyncio.create_task(call.verdict())
    await asyncio.sleep(0)
    feed(call, started(A1, 0))
    await verdict
    assert call.take().deltas == {}


async def test_the_first_failure_stands(call: Call) -> None:
    call.fail(HeadraceError(Reason.DEADLINE_EXCEEDED, "late"))
    call.fail(HeadraceError(Reason.CANCELLED, "left"))
    feed(call, started(A1, 0), completed(A1, 0))
    update = call.take()
    assert update.error is not None
    assert update.error.reason is Reason.DEADLINE_EXCEEDED
    assert call.legs[0].ended  # so that no cancel is sent for it


async def test_legs_end_one_by_one() -> None:
    call = Call(1000, 0.0)
    first, second = call.add_leg(ID, 0), call.add_leg(OTHER, 1)
    call.feed(first, started(A1, 0), 0, 1)
    call.feed(first, completed(A1, 0, tail="x"), 0, 2)
    assert not call.take().done
    call.feed(second, started(A1, 0), 0, 3)
    call.feed(second, completed(A1, 0, tail="y"), 0, 4)
    update = call.take()
    assert update.done
    assert {index: delta.text for index, delta in update.deltas.items()} == {1: "y"}
    assert call.usage == Usage(2, 0)


@given(st.lists(st.tuples(st.integers(0, 1), st.text("abc", max_size=3)), max_size=12), st.data())
def test_no_way_of_taking_loses_or_repeats_text(pieces: list[tuple[int, str]], data: st.DataObject) -> None:
    """Whatever a reader takes at a time, each choice's text is whole, in order, and each id stands for all before it."""

    async def scenario() -> None:
        call = Call(1000, 0.0, name=place)
        leg = call.add_leg(ID, 0)
        rendering = ChatRendering(call, Shape(False, False, "m"), 2)
        counts, shown, offset = [0, 0], ["", ""], 0
        call.feed(leg, started(A1, 0, 0), 0, offset)
        events: list[Input] = []
        for choice, text in pieces:
            events.append(tokens(A1, counts[choice], text, choice))
            counts[choice] += len(text)
        events.append(completed(A1, *counts, tail="!"))
        for event in events:
            offset += 1
            call.feed(leg, event, 0, offset)
            if event is events[-1] or data.draw(st.booleans()):
                update = call.take()
                assert update.event_id == f"{ID}:0:{offset}"
                chunk = rendering.chunk(update)
                for choice in chunk["choices"] if chunk else ():
                    shown[choice["index"]] += choice["delta"].get("content", "")
        assert shown == ["".join(text for choice, text in pieces if choice == i) + "!" for i in range(2)]

    asyncio.run(scenario())


def test_a_request_id_is_read_without_decoding() -> None:
    for event in (started(A1, 0), tokens(A1, 0, "x"), completed(A1, 0), InferenceFailed(*WHERE, "cancelled", "")):
        assert peek_request_id(encode(event)) == ID
        assert peek_request_id(encode_json(event)) is None
    admitted = InferenceAdmitted(ID, "t", "k", "m", "v", "i", Reply("t", 0), "w", 0, 1, 1, 2, 0, 0, Position("r", 0, 0))
    assert peek_request_id(encode(admitted)) is None
    short = TokensGenerated("x", 0, A1, 0, (), "")
    assert peek_request_id(encode(short)) is None
    assert peek_request_id(b"") is None
