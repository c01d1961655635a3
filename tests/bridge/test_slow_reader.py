"""A reader that doesn't read is bounded, told why if it can be, and disturbs nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest
import websockets

from bridge.calls import Call
from bridge.event_ids import Shape
from bridge.inference import messages
from bridge.inference.messages import SERVICE
from bridge.openai_chat import ChatRendering
from bridge.servers import ABORT
from bridge.sse import SseResponse
from decisions.stream import Input
from schemas.events import Attempt, ChoiceEnd, GenerationStarted, InferenceCompleted, Timings, TokensGenerated, Usage
from tests.bridge.conftest import KEY, MODEL, RunningBridge
from tests.bridge.test_cancel import RawCaller, newest
from tests.bridge.test_openai_chat import body, script

ID = "01890a5d-ac96-774b-bcce-b302099a8057"
FLOOD = {"tokens": ["x" * 8000], "repeat": 3000, "hang": True}


async def counted(bridge: RunningBridge, protocol: str) -> float:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{bridge.settings.ops_port}/metrics")).text
    lines = [
        line for line in text.splitlines() if line.startswith("headrace_stream_slow_reader_total") and protocol in line
    ]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


async def test_a_reader_that_stops_reading_is_cut_and_its_request_cancelled(bridge: RunningBridge) -> None:
    before = await counted(bridge, "sse")
    async with RawCaller(bridge) as caller:
        caller.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await caller.post(body(messages=script(mark="flood-sse", **FLOOD)))
        transport: Any = caller.writer.transport
        transport.pause_reading()
        await bridge.until(lambda: newest(bridge, "flood-sse") is not None)
        request_id = newest(bridge, "flood-sse")
        async with bridge.client() as client:
            neighbour = await client.post("/v1/chat/completions", json=body(stream=False))
        assert neighbour.json()["choices"][0]["message"]["content"] == "abc"
        await bridge.until(lambda: request_id in bridge.responder.cancelled)
    assert await counted(bridge, "sse") == before + 1


async def test_a_socket_that_is_not_read_is_cut_and_all_its_requests_cancelled(bridge: RunningBridge) -> None:
    before = await counted(bridge, "websocket")
    url = f"ws://127.0.0.1:{bridge.settings.port}/v1/stream"
    async with websockets.connect(url, additional_headers={"Authorization": f"Bearer {KEY}"}, max_queue=1) as ws:
        for name, directions in (("flood-ws", FLOOD), ("quiet-ws", {"first_ms": 60_000})):
            payload = body(messages=script(mark=name, **directions))
            await ws.send(json.dumps({"type": "request", "id": name, "endpoint": "chat.completions", "body": payload}))
        await bridge.until(lambda: newest(bridge, "quiet-ws") is not None and newest(bridge, "flood-ws") is not None)
        ids = {newest(bridge, "quiet-ws"), newest(bridge, "flood-ws")}
        await bridge.until(lambda: ids <= set(bridge.responder.cancelled))
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await ws.recv()
    assert await counted(bridge, "websocket") == before + 1


@pytest.mark.parametrize("flood", [FLOOD, {**FLOOD, "tokens": ["x" * 300_000], "repeat": 80}], ids=["small", "large"])
async def test_a_grpc_stream_that_is_not_read_is_cut_and_all_its_requests_cancelled(
    bridge: RunningBridge, flood: dict[str, Any]
) -> None:
    """Also where the first message alone is more than a connection takes unread."""
    before = await counted(bridge, "grpc")
    known = set(bridge.responder.seen)
    asked = (json.dumps({**flood, "mark": "flood-grpc"}), json.dumps({"first_ms": 60_000, "mark": "quiet-grpc"}))
    done = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        for text in asked:
            yield infer_request(text)
        await done.wait()

    def of(mark: str) -> str | None:
        seen = [(name, each.event) for name, each in list(bridge.responder.seen.items()) if name not in known]
        return next((name for name, event in seen if mark in (event.prompt or "")), None)

    address = f"127.0.0.1:{bridge.settings.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=(("grpc.http2.bdp_probe", 0),)) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        stream = call(requests(), metadata=(("authorization", f"Bearer {KEY}"),))
        await bridge.until(lambda: of("flood-grpc") is not None and of("quiet-grpc") is not None)
        ids = {of("flood-grpc"), of("quiet-grpc")}
        async with bridge.client() as client:
            neighbour = await client.post("/v1/chat/completions", json=body(stream=False))
        assert neighbour.json()["choices"][0]["message"]["content"] == "abc"
        await bridge.until(lambda: ids <= set(bridge.responder.cancelled))
        with pytest.raises(grpc.aio.AioRpcError) as told:
            while await asyncio.wait_for(stream.read(), 30) is not grpc.aio.EOF:
                pass
        done.set()
    assert dict(told.value.trailing_metadata())["headrace-reason"] == "slow_reader"
    assert await counted(bridge, "grpc") == before + 1


def infer_request(text: str) -> bytes:
    """A prompt whose answer comes in parts."""
    found = messages.ModelInferRequest(model_name=MODEL)
    found.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    found.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return bytes(found.SerializeToString())


# --- the same, without a network ---------------------------------------------------------------------------------------


def events(texts: list[str]) -> list[Input]:
    where = (ID, "t", "m", "v", "interactive", Attempt(1, 1))
    tokens = [TokensGenerated(ID, 0, Attempt(1, 1), i, (i,), text) for i, text in enumerate(texts)]
    end = InferenceCompleted(*where, (ChoiceEnd(0, len(texts), "stop"),), Usage(1, len(texts)), Timings(), "w")
    return [GenerationStarted(*where, (0,), 1, "w"), *tokens, end]


class Reader:
    """Takes what is sent, but only while it is let."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.got: list[bytes] = []
        self.cut = False

    async def send(self, message: Any) -> None:
        await self.let.wait()
        self.got.append(message.get("body", b""))

    @property
    def scope(self) -> dict[str, Any]:
        return {"type": "http", "extensions": {ABORT: self._abort}}

    def _abort(self) -> None:
        self.cut = True


async def never() -> Any:
    await asyncio.Event().wait()


def respond(bound: int) -> tuple[Call, SseResponse, list[bool]]:
    call = Call(bound, 0.0, name=lambda leg: f"{leg.request_id}:{leg.partition}:{leg.offset}")
    call.add_leg(ID, 0)
    finished: list[bool] = []
    response = SseResponse(
        call,
        ChatRendering(call, Shape(False, False, "m"), 1),
        lambda _: None,
        lambda: finished.append(True),
        60.0,
        60.0,
    )
    return call, response, finished


async def test_what_a_slow_reader_has_not_taken_is_merged_into_one_event() -> None:
    call, response, finished = respond(10_000)
    reader = Reader()
    task = asyncio.create_task(response(reader.scope, never, reader.send))
    await asyncio.sleep(0)
    for offset, event in enumerate(events(["a", "b", "c", "d"])):
        call.feed(call.legs[0], event, 3, offset)
    reader.let.set()
    await task
    assert finished == [True]
    body = b"".join(reader.got).decode()
    frames = [frame for frame in body.split("\n\n") if frame]
    assert len(frames) == 3  # the role, one merged event with the end, [DONE]
    assert frames[1].startswith(f"id: {ID}:3:5\n")
    choice = json.loads(frames[1].split("data: ", 1)[1])["choices"][0]
    assert (choice["delta"], choice["finish_reason"]) == ({"content": "abcd"}, "stop")


async def test_a_reader_that_comes_back_in_time_hears_why_it_is_closed() -> None:
    call, response, finished = respond(100)
    reader = Reader()
    task = asyncio.create_task(response(reader.scope, never, reader.send))
    await asyncio.sleep(0)
    for offset, event in enumerate(events(["x" * 60] * 4)):
        call.feed(call.legs[0], event, 3, offset)
    reader.let.set()
    await task
    assert finished == [True]
    assert not reader.cut
    assert b'"code":"slow_reader"' in reader.got[-1]
    assert b"[DONE]" not in b"".join(reader.got)


async def test_a_reader_that_does_not_come_back_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.sse.SLOW_GRACE_S", 0.01)
    call, response, finished = respond(100)
    reader = Reader()
    task = asyncio.create_task(response(reader.scope, never, reader.send))
    await asyncio.sleep(0)
    for offset, event in enumerate(events(["x" * 60] * 4)):
        call.feed(call.legs[0], event, 3, offset)
    await task
    assert reader.cut
    assert finished == [True]


async def test_a_caller_that_waits_is_never_slow_however_much_comes_at_once() -> None:
    call = Call(100, 0.0)
    leg = call.add_leg(ID, 0)
    waiting = asyncio.create_task(call.wait())
    await asyncio.sleep(0)
    for offset, event in enumerate(events(["x" * 60] * 40)):
        call.feed(leg, event, 3, offset)
    assert await waiting
    update = call.take()
    assert update.error is None
    assert update.done
    assert update.deltas[0].text == "x" * 2400
