"""A caller that leaves is heard of in the log, wherever its call stands; and the next call is served."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import httpx
import pytest

from tests.bridge.conftest import KEY, OTHER, TENANT, RunningBridge
from tests.bridge.resuming import resume
from tests.bridge.test_openai_chat import body, script


class RawCaller:
    """A caller whose socket can be cut."""

    def __init__(self, bridge: RunningBridge) -> None:
        self._bridge = bridge

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._bridge.settings.port)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.writer.transport.abort()

    async def post(self, payload: dict[str, Any]) -> None:
        raw = json.dumps(payload).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(raw)}\r\n\r\n"
        self.writer.write(head.encode() + raw)
        await self.writer.drain()


def newest(bridge: RunningBridge, mark: str) -> str | None:
    """The request whose script carries the mark."""
    for request_id, seen in bridge.responder.seen.copy().items():  # it grows meanwhile
        if any(mark in message.content for message in seen.event.messages or ()):
            return request_id
    return None


@pytest.mark.parametrize("cut", ["close", "abort"])
@pytest.mark.parametrize(
    ("mark", "stream", "directions"),
    [
        ("streaming", True, {"tokens": ["x"], "repeat": 4000, "gap_ms": 20}),
        ("whole", False, {"tokens": ["x"], "repeat": 4000, "gap_ms": 20}),
        ("queued", True, {"first_ms": 60_000}),
        ("queued-whole", False, {"first_ms": 60_000}),
        ("started", True, {"tokens": [], "hang": True}),
        ("large", False, {"first_ms": 60_000, "filler": "x" * 300_000}),  # whose reading was paused meanwhile
    ],
)
async def test_a_closed_socket_cancels(
    bridge: RunningBridge, mark: str, stream: bool, directions: dict[str, Any], cut: str
) -> None:
    mark = f"{mark}-{cut}"
    async with RawCaller(bridge) as caller:
        await caller.post(body(stream=stream, messages=script(mark=mark, **directions)))
        await bridge.until(lambda: newest(bridge, mark) is not None)
        if mark.startswith("streaming"):
            for _ in range(3):
                await caller.reader.readuntil(b"\n\n")
        if cut == "abort":
            caller.writer.transport.abort()
        else:
            caller.writer.close()
    request_id = newest(bridge, mark)
    assert request_id is not None
    await bridge.until(lambda: request_id in bridge.responder.cancelled)
    assert bridge.responder.cancelled[request_id].tenant == TENANT
    assert bridge.responder.tokens_sent.get(request_id, 0) < 1000
    async with bridge.client() as client:
        assert (await client.post("/v1/chat/completions", json=body(stream=False))).status_code == 200


async def test_a_finished_call_cancels_nothing(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        for stream in (True, False):
            response = await client.post("/v1/chat/completions", json=body(stream=stream))
            assert response.status_code == 200
            request_id = response.headers["x-request-id"]
            await client.get("/v1/models")
            assert request_id not in bridge.responder.cancelled


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("directions", [{"first_ms": 60_000}, {"tokens": ["a"], "hang": True}])
async def test_a_call_ends_at_its_deadline_though_the_log_is_silent(
    bridge: RunningBridge, stream: bool, directions: dict[str, Any]
) -> None:
    payload = body(stream=stream, messages=script(**directions), timeout=0.3)
    async with bridge.client() as client:
        response = await client.post("/v1/chat/completions", json=payload)
    request_id = response.headers["x-request-id"]
    if stream and "tokens" in directions:
        assert response.status_code == 200
        assert json.loads(response.text.rstrip().rsplit("data: ", 1)[1])["error"]["code"] == "deadline_exceeded"
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    await bridge.until(lambda: request_id in bridge.responder.cancelled)


async def test_the_header_gives_a_deadline_too(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        payload = body(stream=False, messages=script(first_ms=60_000))
        response = await client.post("/v1/chat/completions", json=payload, headers={"X-Headrace-Timeout-Ms": "200"})
    assert response.status_code == 504


async def test_pipelined_and_repeated_calls_on_one_connection(bridge: RunningBridge) -> None:
    limits = httpx.Limits(max_connections=1)
    async with bridge.client(limits=limits) as client:
        answers = await asyncio.gather(
            *[client.post("/v1/chat/completions", json=body(stream=bool(i % 2))) for i in range(6)]
        )
    assert [answer.status_code for answer in answers] == [200] * 6


@pytest.mark.parametrize("at_once", [True, False])
async def test_who_leaves_with_calls_pipelined_cancels_the_one_that_runs(
    bridge: RunningBridge, *, at_once: bool
) -> None:
    mark = f"pipelined {at_once}"
    async with RawCaller(bridge) as caller:
        await caller.post(body(stream=False, messages=script(mark=mark, first_ms=60_000)))
        if not at_once:
            await bridge.until(lambda: newest(bridge, mark) is not None)
        await caller.post(body(stream=False))
        await bridge.until(lambda: newest(bridge, mark) is not None)
        await asyncio.sleep(0.2)  # the second has come
    request_id = newest(bridge, mark)
    assert request_id is not None
    await bridge.until(lambda: request_id in bridge.responder.cancelled)


async def delete(bridge: RunningBridge, stream: str, key: str = KEY) -> httpx.Response:
    async with bridge.client() as client:
        return await client.delete(f"/v1/streams/{stream}", headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("headers", [{"X-Headrace-On-Disconnect": "continue"}, {"Idempotency-Key": "a cancelled one"}])
async def test_a_request_is_cancelled_by_its_id_at_any_front_door(
    bridge: RunningBridge, other: RunningBridge, headers: dict[str, str]
) -> None:
    payload = body(messages=script(hang=True, tokens=["a"]))
    async with (
        bridge.client() as client,
        client.stream("POST", "/v1/chat/completions", json=payload, headers=headers) as response,
    ):
        request_id = response.headers["x-request-id"]
    assert request_id not in bridge.responder.cancelled
    for where, name in ((other, request_id), (bridge, f"chatcmpl-{request_id}")):
        bridge.responder.cancelled.pop(request_id, None)
        answer = await delete(where, name)
        assert (answer.status_code, answer.json()) == (
            202,
            {"id": request_id, "object": "stream", "status": "cancelling"},
        )
        await bridge.until(lambda: request_id in bridge.responder.cancelled)
        grant = bridge.responder.cancelled[request_id]
        assert (grant.tenant, grant.reply) == (TENANT, bridge.responder.seen[request_id].grant.reply)


async def test_a_request_that_waits_for_its_turn_is_cancelled_wherever_it_was_asked(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    """Nothing is known of it in `lifecycle` then: whoever has it open knows, and for others there is its own record."""
    async with RawCaller(bridge) as caller:
        await caller.post(body(messages=script(mark="waits", unadmitted=True)))
        await bridge.until(lambda: newest(bridge, "waits") is not None)
        request_id = newest(bridge, "waits")
        assert request_id is not None
        for where in (bridge, other):
            assert (await delete(where, request_id, OTHER)).status_code == 404
        for where in (other, bridge):
            bridge.responder.cancelled.pop(request_id, None)
            assert (await delete(where, request_id)).status_code == 202
            await bridge.until(lambda: request_id in bridge.responder.cancelled)
            grant = bridge.responder.cancelled[request_id]
            assert (grant.tenant, grant.reply) == (TENANT, bridge.responder.seen[request_id].grant.reply)


async def test_nobody_cancels_what_is_foreign_or_unknown(bridge: RunningBridge, other: RunningBridge) -> None:
    async with bridge.client() as client:
        headers = {"X-Headrace-On-Disconnect": "continue"}
        response = await client.post("/v1/chat/completions", json=body(stream=False), headers=headers)
    request_id = response.headers["x-request-id"]
    unknown = "01890a5d-ac96-774b-bcce-b302099a8057"
    for name, key in ((request_id, OTHER), (unknown, KEY), ("zork", KEY)):
        for where in (bridge, other):
            refused = await delete(where, name, key)
            resumed, _ = await resume(where, name, key=key)
            assert (refused.status_code, refused.json()) == (404, resumed.json())
    assert (await delete(bridge, request_id, "hr-nobody")).status_code == 401
    assert not {request_id, unknown} & set(bridge.responder.cancelled)
    async with bridge.client() as client:
        refused = await client.delete(f"/v1/streams/{request_id}", params={"zork": "1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "zork")


async def test_what_was_refused_needs_no_cancel(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        response = await client.post("/v1/chat/completions", json=body(messages=script(reject="overloaded")))
    request_id = response.headers["x-request-id"]
    assert (await delete(bridge, request_id)).status_code == 202
    assert request_id not in bridge.responder.cancelled
