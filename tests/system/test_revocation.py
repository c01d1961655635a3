"""A revoked key is refused everywhere at once, and what it has open ends: streams, sockets, and the answers behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.system.audit import Audit
from tests.system.running import CALL_WAIT_S, MODEL, RunningStack, script

pytestmark = pytest.mark.timeout(180)
TENANT = "leaver"
SLOW = script(tokens=["still here "], repeat=300, token_ms=200)


@pytest.fixture
def key(stack: RunningStack) -> dict[str, Any]:
    """A key that a test may revoke."""
    command = ("keys", "add", TENANT) if TENANT in stack.command("tenants", "list").stdout else ("create", TENANT)
    given: dict[str, Any] = json.loads(stack.command("tenants", *command, "--json").stdout)
    return given


def revoke(stack: RunningStack, key: dict[str, Any]) -> None:
    stack.command("tenants", "keys", "revoke", TENANT, key["key_id"])


def body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": SLOW}], "stream": True, **options}


@contextmanager
def socket_of(stack: RunningStack, key: dict[str, Any]) -> Iterator[ClientConnection]:
    url = stack.base_url.replace("http", "ws", 1) + "/v1/stream"
    with connect(url, additional_headers={"authorization": f"Bearer {key['key']}"}, proxy=None) as socket:
        assert json.loads(socket.recv(CALL_WAIT_S))["type"] == "ready"
        yield socket


def until_error(socket: ClientConnection, call_id: str | None) -> dict[str, Any]:
    while True:
        message: dict[str, Any] = json.loads(socket.recv(CALL_WAIT_S))
        if message["type"] == "error" and message["id"] == call_id:
            return message


def test_an_open_stream_ends_and_its_answer_stops(stack: RunningStack, key: dict[str, Any]) -> None:
    audit = Audit(stack)
    headers = {"authorization": f"Bearer {key['key']}"}
    with (
        httpx.Client(base_url=stack.base_url, headers=headers, timeout=CALL_WAIT_S, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body()) as response,
    ):
        lines = response.iter_lines()
        next(line for line in lines if "still here" in line)
        revoke(stack, key)
        (error,) = [json.loads(line.removeprefix("data: "))["error"] for line in lines if '"error"' in line]
        assert error["code"] == "invalid_api_key"
        assert "revoked" in error["message"]
        assert client.post("/v1/chat/completions", json=body(stream=False)).status_code == 401
    (story,) = audit.settled().values()
    assert story.endings[0][:2] == ("failed", "cancelled")


def test_open_sockets_close(stack: RunningStack, key: dict[str, Any]) -> None:
    with socket_of(stack, key) as idle, socket_of(stack, key) as busy:
        busy.send(json.dumps({"type": "request", "id": "1", "endpoint": "chat.completions", "body": body()}))
        while json.loads(busy.recv(CALL_WAIT_S))["type"] != "chunk":
            pass
        revoke(stack, key)
        assert "revoked" in until_error(busy, "1")["error"]["message"]
        for socket in (busy, idle):
            assert until_error(socket, None)["error"]["code"] == "invalid_api_key"
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(CALL_WAIT_S)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "invalid_api_key")


def test_another_key_of_the_tenant_goes_on(stack: RunningStack, key: dict[str, Any]) -> None:
    other: dict[str, Any] = json.loads(stack.command("tenants", "keys", "add", TENANT, "--json").stdout)
    with socket_of(stack, other) as socket:
        revoke(stack, key)
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
        socket.send(json.dumps({"type": "request", "id": "1", "endpoint": "chat.completions", "body": asked}))
        while (message := json.loads(socket.recv(CALL_WAIT_S)))["type"] != "done":
            assert message["type"] != "error", message
