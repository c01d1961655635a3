"""Several calls on one socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets

from bridge.main import WS_ENVELOPE_BYTES
from bridge.openai_answers import ChatChunk, ErrorAnswer
from bridge.openai_chat import ChatCall
from tests.bridge.conftest import KEY, MODEL, REVOKED, RunningBridge
from tests.bridge.test_cancel import newest
from tests.bridge.test_openai_chat import script

Message = dict[str, Any]


class Caller:
    def __init__(self, ws: websockets.ClientConnection) -> None:
        self.ws = ws

    async def say(self, **message: Any) -> None:
        await self.ws.send(json.dumps(message))

    async def ask(self, call_id: Any, endpoint: str = "chat.completions", **fields: Any) -> None:
        await self.say(type="request", id=call_id, endpoint=endpoint, body={"model": MODEL, **fields})

    async def hear(self) -> Message:
        message: Message = json.loads(await self.ws.recv())
        return message

    async def until_ended(self, *call_ids: str) -> dict[str, list[Message]]:
        """Everything heard, by id, until each of these is done or failed."""
        heard: dict[str, list[Message]] = {call_id: [] for call_id in call_ids}
        waiting = set(call_ids)
        while waiting:
            message = await self.hear()
            heard.setdefault(message["id"], []).append(message)
            if message["type"] in ("done", "error"):
                waiting.discard(message["id"])
        return heard


@asynccontextmanager
async def calling(bridge: RunningBridge, key: str | None = KEY) -> AsyncIterator[Caller]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with websockets.connect(f"ws://127.0.0.1:{bridge.settings.port}/v1/stream", additional_headers=headers) as ws:
        caller = Caller(ws)
        if key is not None:
            assert await caller.hear() == {"type": "ready"}
        yield caller


def text_of(messages: list[Message]) -> str:
    chunks = [message["data"] for message in messages if message["type"] == "chunk"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def test_several_requests_share_a_socket(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        for call_id in ("a", "b", "c"):
            messages = script(tokens=[call_id, "-", call_id], gap_ms=10)
            await caller.ask(call_id, messages=messages, stream_options={"include_usage": True})
        heard = await caller.until_ended("a", "b", "c")
    for call_id, messages in heard.items():
        assert text_of(messages) == f"{call_id}-{call_id}"
        assert [message["type"] for message in messages[:1] + messages[-1:]] == ["started", "done"]
        request_id = messages[0]["request_id"]
        assert bridge.responder.seen[request_id].event.stream
        chunks = [message for message in messages if message["type"] == "chunk"]
        assert [chunk["data"]["choices"] for chunk in chunks[-1:]] == [[]]
        for chunk in chunks:
            ChatChunk.model_validate(chunk["data"])
        ids = [chunk.get("event_id") for chunk in chunks]
        assert ids[0] is None is ids[-1]
        assert all(str(event_id).startswith(f"{request_id}:") for event_id in ids[1:-1])


async def test_completions_are_served_too(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        await caller.ask("a", endpoint="completions", prompt=["hi", "ho"], stream=True)
        heard = await caller.until_ended("a")
    texts = ["", ""]
    for message in heard["a"]:
        for choice in message["data"]["choices"] if message["type"] == "chunk" else ():
            texts[choice["index"]] += choice["text"]
    assert texts == ["hi", "ho"]


@pytest.mark.parametrize("mark", ["ws-queued", "ws-running"])
async def test_a_cancel_ends_its_request_and_no_other(bridge: RunningBridge, mark: str) -> None:
    directions = {"first_ms": 60_000} if mark == "ws-queued" else {"tokens": ["x"], "repeat": 4000, "gap_ms": 10}
    async with calling(bridge) as caller:
        await caller.ask("a", messages=script(mark=mark, **directions))
        await caller.ask("b", messages=script(tokens=["y", "z"], gap_ms=200))
        await bridge.until(lambda: newest(bridge, mark) is not None)
        await caller.say(type="cancel", id="a")
        heard = await caller.until_ended("a", "b")
        assert heard["a"][-1]["error"]["code"] == "cancelled"
        assert text_of(heard["b"]) == "yz"
        request_id = newest(bridge, mark)
        await bridge.until(lambda: request_id in bridge.responder.cancelled)
        await caller.ask("a", messages=script(tokens=["again"]))
        assert text_of((await caller.until_ended("a"))["a"]) == "again"


async def test_a_closed_socket_cancels_all(bridge: RunningBridge) -> None:
    marks = ["ws-left-1", "ws-left-2"]
    async with calling(bridge) as caller:
        for mark in marks:
            await caller.ask(mark, messages=script(mark=mark, first_ms=60_000))
        await bridge.until(lambda: all(newest(bridge, mark) for mark in marks))
    ids = {newest(bridge, mark) for mark in marks}
    await bridge.until(lambda: ids <= set(bridge.responder.cancelled))


async def test_errors_belong_to_their_request(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        await caller.ask("a", messages=script(), tools=[{}])
        await caller.ask("b", endpoint="embeddings", input="x")
        await caller.ask("c", messages=script(reject="rate_limited"))
        await caller.ask("d", messages=script(tokens=["x", "y"], fail="engine_error", fail_after=1, gap_ms=30))
        heard = await caller.until_ended("a", "b", "c", "d")
        assert (heard["a"][-1]["error"]["param"], heard["b"][-1]["error"]["param"]) == ("tools", "endpoint")
        assert [message["type"] for message in heard["c"]] == ["error"]
        assert heard["c"][-1]["error"]["code"] == "rate_limited"
        assert (text_of(heard["d"]), heard["d"][-1]["error"]["code"]) == ("x", "engine_error")
        await caller.ask("e", messages=script(tokens=["y"]), stream=False)
        assert (await caller.hear())["error"]["param"] == "stream"
        await caller.ask("a", messages=script(tokens=["fine"]))
        assert text_of((await caller.until_ended("a"))["a"]) == "fine"


@pytest.mark.parametrize("step", ["__init__", "rendering"])
async def test_a_crash_ends_its_request_and_no_other(
    bridge: RunningBridge, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def crash(*_args: Any) -> None:
        raise RuntimeError("a bug")

    async with calling(bridge) as caller:
        await caller.ask("a", endpoint="completions", prompt="hi", stream=True)
        with monkeypatch.context() as patched:
            patched.setattr(ChatCall, step, crash)
            await caller.ask("b", messages=script(tokens=["x"]))
            heard = await caller.until_ended("a", "b")
        assert heard["b"][-1]["error"]["code"] == "internal_error"
        assert "a bug" not in heard["b"][-1]["error"]["message"]
        assert heard["a"][-1]["type"] == "done"
        await caller.ask("b", messages=script(tokens=["fine"]))
        assert text_of((await caller.until_ended("b"))["b"]) == "fine"


MALFORMED: list[tuple[Any, str | None]] = [
    ("x", None),
    ("[]", None),
    (b"\x00\x01", None),
    ('{"type": "zork"}', "type"),
    ('{"id": "a"}', "type"),
    ('{"type": ["request"], "id": "a"}', "type"),
    ('{"type": "request"}', "id"),
    ('{"type": "request", "id": 1}', "id"),
    ('{"type": "request", "id": ""}', "id"),
    (json.dumps({"type": "request", "id": "x" * 129}), "id"),
    ('{"type": "request", "id": "a", "zork": 1}', "zork"),
    ('{"type": "cancel", "id": "nobody"}', "id"),
    ('{"type": "cancel", "id": "\\ud800"}', "id"),
]


@pytest.mark.parametrize(("raw", "param"), MALFORMED)
async def test_a_malformed_message_gets_an_error_and_the_socket_stays(
    bridge: RunningBridge, raw: Any, param: str | None
) -> None:
    async with calling(bridge) as caller:
        await caller.ws.send(raw)
        message = await caller.hear()
        assert (message["type"], message["id"], message["error"]["param"]) == ("error", None, param)
        ErrorAnswer.model_validate({"error": message["error"]})
        await caller.ask("a", messages=script(tokens=["y"]))
        assert text_of((await caller.until_ended("a"))["a"]) == "y"


async def test_an_id_in_use_is_refused_and_its_request_goes_on(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        await caller.ask("a", messages=script(tokens=["x", "y"], gap_ms=100))
        await caller.ask("a", messages=script(tokens=["z"]))
        heard = await caller.until_ended("a")
    errors = heard.pop(None)  # type: ignore[call-overload]
    assert [error["error"]["code"] for error in errors] == ["conflict"]
    assert text_of(heard["a"]) == "xy"


async def test_a_socket_carries_so_many_requests_and_no_more(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        for i in range(bridge.settings.socket_requests_max + 1):
            await caller.ask(str(i), messages=script(tokens=["x"], first_ms=300))
        assert (await caller.hear())["error"]["code"] == "rate_limited"
        ids = [str(i) for i in range(bridge.settings.socket_requests_max)]
        assert all(text_of(messages) == "x" for messages in (await caller.until_ended(*ids)).values())


async def test_a_message_beyond_the_limit_closes_the_socket(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        with pytest.raises(websockets.ConnectionClosed) as caught:
            limit = bridge.settings.body_bytes_max + WS_ENVELOPE_BYTES
            await caller.ask("a", messages=[{"role": "user", "content": "x" * limit}])
            await caller.hear()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009


async def test_a_browser_says_its_key_in_its_first_message(bridge: RunningBridge) -> None:
    async with calling(bridge, key=None) as caller:
        await caller.say(type="auth", api_key=KEY)
        assert await caller.hear() == {"type": "ready"}
        await caller.ask("a", messages=script(tokens=["y"]))
        assert text_of((await caller.until_ended("a"))["a"]) == "y"


@pytest.mark.parametrize(
    "first",
    [
        {"type": "auth", "api_key": "hr-unknown"},
        {"type": "auth", "api_key": REVOKED},
        {"type": "auth"},
        {"type": "request", "id": "a"},
        [],
    ],
)
async def test_nobody_gets_in_by_a_wrong_first_message(bridge: RunningBridge, first: Any) -> None:
    async with calling(bridge, key=None) as caller:
        await caller.ws.send(json.dumps(first))
        assert (await caller.hear())["type"] == "error"
        with pytest.raises(websockets.ConnectionClosed) as caught:
            await caller.hear()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1008


async def test_a_wrong_key_is_refused_before_the_socket_opens(bridge: RunningBridge) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with calling(bridge, key="hr-unknown"):
            pass
    assert caught.value.response.status_code == 401
    ErrorAnswer.model_validate_json(caught.value.response.body or b"")
