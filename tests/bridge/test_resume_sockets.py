"""A WebSocket resumes what HTTP began, and refuses what HTTP refuses."""

from __future__ import annotations

import json
from typing import Any

from tests.bridge.conftest import MODEL, RunningBridge
from tests.bridge.resuming import USAGE
from tests.bridge.test_cancel import newest
from tests.bridge.test_openai_chat import script
from tests.bridge.test_websocket import calling
from tests.bridge.told import Events, Told


async def test_a_socket_resumes_too(bridge: RunningBridge, other: RunningBridge) -> None:
    async with calling(bridge) as caller:
        payload = {"messages": script(tokens=["a", "b", "c", "d"], gap_ms=40), "n": 2}
        message = {"id": "a", "endpoint": "chat.completions", "on_disconnect": "continue"}
        await caller.say(type="request", body={"model": MODEL, **payload, **USAGE}, **message)
        heard = [await caller.hear() for _ in range(6)]
    request_id = heard[0]["request_id"]
    last = [message["event_id"] for message in heard if "event_id" in message][-1]
    async with calling(other) as caller:
        await caller.say(type="resume", id="b", request_id=request_id, last_event_id=last)
        rest = (await caller.until_ended("b"))["b"]
        await caller.say(type="resume", id="c", request_id=request_id, include_usage=True)
        again = (await caller.until_ended("c"))["c"]
    assert rest[0] == {"type": "started", "id": "b", "request_id": request_id}

    def told(*parts: list[dict[str, Any]]) -> Told:
        chunks = [message for part in parts for message in part if message["type"] == "chunk"]
        return Told().hear([(None, json.dumps(chunk["data"])) for chunk in chunks])

    assert told(heard, rest) == told(again)
    assert told(again).texts == {0: "abcd", 1: "abcd"}
    assert request_id not in bridge.responder.cancelled


async def test_a_socket_resumes_what_waits_for_its_turn(bridge: RunningBridge, other: RunningBridge) -> None:
    body = {"model": MODEL, "messages": script(mark="socket waits", turn_ms=5_000, tokens=["a", "b"])}
    async with calling(bridge) as asking, calling(other) as caller:
        await asking.say(type="request", id="a", endpoint="chat.completions", body=body)
        await bridge.until(lambda: newest(bridge, "socket waits") is not None)
        await caller.say(type="resume", id="b", request_id=newest(bridge, "socket waits"))
        heard = (await caller.until_ended("b"))["b"]
    chunks: Events = [(None, json.dumps(message["data"])) for message in heard if message["type"] == "chunk"]
    assert Told().hear(chunks).texts == {0: "ab"}


async def test_a_socket_refuses_what_http_refuses(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        await caller.say(type="resume", id="a", request_id="01890a5d-ac96-774b-bcce-b302099a8057")
        assert (await caller.hear())["error"]["code"] == "not_found"
        for field_name, value in (
            ("request_id", 1),
            ("last_event_id", 1),
            ("last_event_id", "x"),
            ("format", []),
            ("include_usage", {}),
            ("on_disconnect", []),
        ):
            good = {"request_id": "01890a5d-ac96-774b-bcce-b302099a8057"}
            await caller.say(type="resume", id="a", **{**good, field_name: value})
            assert (await caller.hear())["error"]["param"] == field_name
