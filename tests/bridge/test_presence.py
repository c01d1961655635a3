"""A front door says that it is there while it has calls open, and which streams it has taken up; requests say who watches them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from bridge.presence import QUIET_BEATS, Presence
from infra.log import EventDecoder, NotDelivered
from infra.read import read_to_end
from schemas.events import FrontDoorSeen, InferenceRequested
from schemas.topics import DOORS
from tests.bridge.conftest import WAIT_S, RunningBridge
from tests.bridge.test_cancel import newest
from tests.bridge.test_idempotency import new_key
from tests.bridge.test_openai_chat import body, script
from tests.bridge.test_websocket import calling

CHAT = "/v1/chat/completions"
ASKED = [InferenceRequested("r", "m", prompt="x"), InferenceRequested("s", "m", prompt="y")]

# --- what is told, to a log that may not take it -----------------------------------------------------------------------


class Door:
    """A front door's calls and streams, and what it has told."""

    def __init__(self, beat_s: float = 0.02) -> None:
        self.open, self.streams, self.down = 0, set[str](), False
        self.told: list[FrontDoorSeen] = []
        self.presence = Presence(
            self,  # type: ignore[arg-type]
            lambda: self.open,
            lambda: self.streams,
            beat_s=beat_s,
            spacing_s=0.005,
        )

    async def send(self, topic: str, event: FrontDoorSeen, *, key: str) -> None:
        if self.down:
            raise NotDelivered("out of reach")
        assert (topic, key) == (DOORS, event.door)
        self.told.append(event)

    async def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, "waited too long"
            await asyncio.sleep(0.005)


@pytest.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    door = Door(*getattr(request, "param", ()))
    running = asyncio.create_task(door.presence.run())
    yield door
    assert not running.done()
    running.cancel()


async def test_it_tells_while_something_is_open_and_a_little_longer_and_is_silent_else(door: Door) -> None:
    await asyncio.sleep(0.1)
    assert not door.told
    door.open = 1
    door.presence.watching(ASKED, outlives=True)
    await door.until(lambda: len(door.told) > 3 * QUIET_BEATS)
    door.open = 0
    before = len(door.told)
    await asyncio.sleep(0.5)
    assert before + QUIET_BEATS <= len(door.told) <= before + QUIET_BEATS + 1
    assert set(door.told) == {FrontDoorSeen(door.presence.door)}


async def test_what_the_log_does_not_take_is_told_again(door: Door) -> None:
    door.open, door.down = 1, True
    door.presence.watching(ASKED, outlives=False)
    await asyncio.sleep(0.1)
    door.down = False
    await door.until(lambda: bool(door.told))


@pytest.mark.parametrize("door", [(60.0,)], indirect=True)
async def test_a_stream_that_is_taken_up_is_told_of_at_once(door: Door) -> None:
    door.open = 1
    door.presence.watching(ASKED, outlives=False)
    await door.until(lambda: bool(door.told))
    door.streams.update(("r", "s"))
    door.presence.adopting()
    await door.until(lambda: door.told[-1].adopted == ("r", "s"))


async def test_requests_that_outlive_their_callers_name_nobody(door: Door) -> None:
    assert list(door.presence.watching(ASKED, outlives=True)) == ASKED
    named = door.presence.watching(ASKED, outlives=False)
    assert {request.door for request in named} == {door.presence.door} != {""}
    assert Door().presence.door != door.presence.door


# --- at a running front door -------------------------------------------------------------------------------------------


async def told(bridge: RunningBridge) -> list[FrontDoorSeen]:
    decoder = EventDecoder(bridge.settings.kafka)
    events = [await decoder.decode(record.value) async for record in read_to_end(bridge.settings.kafka, DOORS)]
    return [event for event in events if isinstance(event, FrontDoorSeen)]


async def until_told(bridge: RunningBridge, condition: Callable[[list[FrontDoorSeen]], Any]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition(await told(bridge)):
        assert time.monotonic() < end_s, "waited too long"
        await asyncio.sleep(0.1)


async def begun(response: httpx.Response) -> tuple[str, AsyncIterator[str]]:
    """The id of a stream's first event that has one, and the rest of its lines: who lets go of them closes the connection."""
    lines = response.aiter_lines()
    while not (line := await anext(lines)).startswith("id:"):
        pass
    return line.removeprefix("id:").strip(), lines


def door_of(bridge: RunningBridge, mark: str) -> str:
    """Who watches the request, as it says itself."""
    request_id = newest(bridge, mark)
    assert request_id is not None
    return bridge.responder.seen[request_id].event.door


@pytest.mark.parametrize("headers", [{}, {"X-Headrace-On-Disconnect": "continue"}])
async def test_a_front_door_with_an_open_call_tells_so(bridge: RunningBridge, headers: dict[str, str]) -> None:
    mark = f"present {headers}"
    payload = body(messages=script(mark=mark, tokens=["a"], hang=True))
    async with bridge.client() as client, client.stream("POST", CHAT, json=payload, headers=headers) as response:
        _, _lines = await begun(response)
        door = door_of(bridge, mark)
        assert bool(door) is not bool(headers)
        count = len([event for event in await told(bridge) if event.door == door])
        await until_told(bridge, lambda events: len([e for e in events if not door or e.door == door]) > count + 1)


async def test_a_sockets_requests_are_watched_and_keyed_ones_are_not(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        for name, more in (("watched", {}), ("keyed", {"idempotency_key": new_key()})):
            messages = script(mark=f"socket {name}", tokens=["a"])
            asked = {"endpoint": "chat.completions", "body": {"model": body()["model"], "messages": messages}}
            await caller.say(type="request", id=name, **asked, **more)
            await caller.until_ended(name)
    assert door_of(bridge, "socket watched")
    assert not door_of(bridge, "socket keyed")


async def test_a_stream_that_is_taken_up_again_is_adopted_where_it_is_read(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    mark = "adopted elsewhere"
    payload = body(messages=script(mark=mark, tokens=["a"], repeat=4_000, gap_ms=50))
    async with bridge.client() as client, client.stream("POST", CHAT, json=payload) as response:
        place, _lines = await begun(response)
        request_id, door = response.headers["x-request-id"], door_of(bridge, mark)
        assert not any(request_id in event.adopted for event in await told(bridge))
        path = f"/v1/streams/{request_id}"
        async with other.client() as there, there.stream("GET", path, headers={"Last-Event-ID": place}) as again:
            _, _more = await begun(again)
            await until_told(bridge, lambda events: any(request_id in event.adopted for event in events))
            adopters = {event.door for event in await told(bridge) if request_id in event.adopted}
            assert len(adopters) == 1 and door not in adopters
        await until_told(bridge, lambda events: request_id not in [e for e in events if e.door in adopters][-1].adopted)


async def test_a_repeat_adopts_the_first(bridge: RunningBridge, other: RunningBridge) -> None:
    key, mark = new_key(), "adopted by a repeat"
    payload = body(messages=script(mark=mark, tokens=["a"], repeat=4_000, gap_ms=50))
    headers = {"Idempotency-Key": key, "X-Headrace-On-Disconnect": "cancel"}
    async with bridge.client() as client, client.stream("POST", CHAT, json=payload, headers=headers) as response:
        _, _lines = await begun(response)
        request_id = response.headers["x-request-id"]
        assert door_of(bridge, mark)
        async with other.client() as there, there.stream("POST", CHAT, json=payload, headers=headers) as again:
            _, _more = await begun(again)
            assert again.headers["x-request-id"] == request_id
            await until_told(bridge, lambda events: any(request_id in event.adopted for event in events))
