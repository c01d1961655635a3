"""A revoked key is refused everywhere within two seconds, and what it has open ends: streams, sockets, calls, and the answers behind them."""

from __future__ import annotations

import itertools
import json
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from bridge.calls import new_request_id
from bridge.openapi import document
from infra import ports
from infra.log import EventProducer
from schemas.events import InferenceRequested, Message
from schemas.topics import GRANT_HEADER, requests_topic
from tests.system.audit import Audit
from tests.system.running import CALL_WAIT_S, MODEL, RunningStack, script

pytestmark = pytest.mark.timeout(180)
TENANT = "leaver"
SLOW = script(tokens=["still here "], repeat=300, token_ms=200)
PROMISED_S = 2.0
MARGIN_S = 8.0
"""What is promised holds where processes get their turn at once: a machine that does other things, too, has so much more."""
HEARD_S_MAX = PROMISED_S + MARGIN_S
"""From the end of the command that revokes."""
GRPC_METHODS = ("ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer", "RepositoryIndex", "ModelStreamInfer")


@dataclass(frozen=True, slots=True)
class Doors:
    """Two front doors; the second also speaks gRPC."""

    urls: tuple[str, str]
    grpc: str


@pytest.fixture(scope="module")
def doors(stack: RunningStack) -> Iterator[Doors]:
    port, grpc_port = ports.free_port(), ports.free_port()
    name = "bridge-revoking"
    stack.add(name, "bridge", "--port", str(port), HEADRACE_BRIDGE_GRPC_PORT=str(grpc_port))
    stack.await_ready(name)
    yield Doors((stack.base_url, f"http://127.0.0.1:{port}"), f"127.0.0.1:{grpc_port}")
    stack.remove(name)


@pytest.fixture
def key(stack: RunningStack) -> dict[str, Any]:
    """A key that a test may revoke."""
    command = ("keys", "add", TENANT) if TENANT in stack.command("tenants", "list").stdout else ("create", TENANT)
    given: dict[str, Any] = json.loads(stack.command("tenants", *command, "--json").stdout)
    return given


def revoke(stack: RunningStack, key: dict[str, Any]) -> None:
    stack.command("tenants", "keys", "revoke", TENANT, key["key_id"])


def authorized(key: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {key['key']}"}


def body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": SLOW}], "stream": True, **options}


@contextmanager
def socket_of(stack: RunningStack, key: dict[str, Any]) -> Iterator[ClientConnection]:
    url = stack.base_url.replace("http", "ws", 1) + "/v1/stream"
    with connect(url, additional_headers=authorized(key), proxy=None) as socket:
        assert json.loads(socket.recv(CALL_WAIT_S))["type"] == "ready"
        yield socket


def until_error(socket: ClientConnection, call_id: str | None) -> dict[str, Any]:
    while True:
        message: dict[str, Any] = json.loads(socket.recv(CALL_WAIT_S))
        if message["type"] == "error" and message["id"] == call_id:
            return message


# --- who comes --------------------------------------------------------------------------------------------------------


def http_refusals(url: str, key: dict[str, Any]) -> dict[str, bool]:
    """For each operation that a front door describes as one that takes a key, whether this key is refused."""
    names = {"model": MODEL, "version": "1", "stream": new_request_id()}
    found = {}
    with httpx.Client(base_url=url, headers=authorized(key), timeout=CALL_WAIT_S, trust_env=False) as client:
        for path, methods in document()["paths"].items():
            for method, described in methods.items():
                if described.get("security") != []:
                    answer = client.request(method, path.format(**names), json={} if method == "post" else None)
                    found[f"{method} {path}"] = answer.status_code == httpx.codes.UNAUTHORIZED
    return found


def socket_refusals(url: str, key: dict[str, Any]) -> dict[str, bool]:
    """The same of a socket, with the key in a header and in the first message."""
    address = url.replace("http", "ws", 1) + "/v1/stream"
    found = {}
    try:
        with connect(address, additional_headers=authorized(key), proxy=None):
            found["socket"] = False
    except InvalidStatus as refused:
        found["socket"] = refused.response.status_code == httpx.codes.UNAUTHORIZED
    with connect(address, proxy=None) as socket:
        socket.send(json.dumps({"type": "auth", "api_key": key["key"]}))
        found["socket, first message"] = json.loads(socket.recv(CALL_WAIT_S))["type"] == "error"
    return found


def grpc_refusals(address: str, key: dict[str, Any]) -> dict[str, bool]:
    """The same of gRPC. No message is one: every method looks at the key first."""
    found = {}
    with grpc.insecure_channel(address) as channel:
        for method in GRPC_METHODS:
            call: Any = channel.stream_unary(f"/inference.GRPCInferenceService/{method}")
            try:
                call(iter([b"\xff"]), metadata=tuple(authorized(key).items()), timeout=CALL_WAIT_S)
                found[method] = False
            except grpc.RpcError as error:
                found[method] = error.code() is grpc.StatusCode.UNAUTHENTICATED
    return found


def refusals(doors: Doors, key: dict[str, Any]) -> dict[str, bool]:
    found = {f"gRPC {method}": refused for method, refused in grpc_refusals(doors.grpc, key).items()}
    for number, url in enumerate(doors.urls):
        both = http_refusals(url, key) | socket_refusals(url, key)
        found |= {f"door {number} {what}": refused for what, refused in both.items()}
    return found


@pytest.mark.parametrize("whole_tenant", [False, True])
def test_it_is_refused_at_every_door_and_on_every_way_in(
    stack: RunningStack, doors: Doors, key: dict[str, Any], whole_tenant: bool
) -> None:
    if whole_tenant:
        key = json.loads(stack.command("tenants", "create", "shut-out", "--json").stdout)
    stack.until(lambda: not any(refusals(doors, key).values()))
    if whole_tenant:
        stack.command("tenants", "revoke", "shut-out")
    else:
        revoke(stack, key)
    stack.until(lambda: all(known_to(url, key) for url in doors.urls), HEARD_S_MAX)
    assert [what for what, refused in refusals(doors, key).items() if not refused] == []


def known_to(url: str, key: dict[str, Any]) -> bool:
    answer = httpx.get(f"{url}/v1/models", headers=authorized(key), timeout=CALL_WAIT_S, trust_env=False)
    return answer.status_code == httpx.codes.UNAUTHORIZED


def test_its_grant_lets_nothing_in(stack: RunningStack, key: dict[str, Any]) -> None:
    """A direct producer has its grant for an hour, and loses it with the key."""
    given = json.loads(
        stack.command("tenants", "grant", TENANT, "--key-id", key["key_id"], "--expires", "1h", "--json").stdout
    )
    assert stack.ended(stack.thread.run(ask(stack, given))).facts["outcome"] == "completed"
    revoke(stack, key)
    refused = stack.ended(stack.thread.run(ask(stack, given)), HEARD_S_MAX)
    assert (refused.facts["outcome"], refused.facts["reason"]) == ("rejected", "invalid_grant")
    assert "is revoked" in stack.command("tenants", "grant", TENANT, "--key-id", key["key_id"], check=False).stderr


async def ask(stack: RunningStack, given: dict[str, Any]) -> str:
    request = InferenceRequested(new_request_id(), MODEL, messages=(Message("user", "direct"),))
    producer = EventProducer(stack.kafka, "revocation-tests")
    await producer.start()
    try:
        headers = [(GRANT_HEADER, given["grant"].encode())]
        await producer.send_and_wait(requests_topic("interactive"), request, key=given["tenant"], headers=headers)
    finally:
        await producer.stop()
    return request.request_id


# --- what is open -----------------------------------------------------------------------------------------------------


Opened = Callable[[Doors, dict[str, Any]], str]
"""Opens something with a key, waits for its end, and returns what its caller is told."""


def client_of(doors: Doors, key: dict[str, Any]) -> httpx.Client:
    return httpx.Client(base_url=doors.urls[1], headers=authorized(key), timeout=CALL_WAIT_S, trust_env=False)


def told_by_events(answer: httpx.Response) -> str:
    """The error that a stream of events ends with."""
    last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")][-1]
    return str(last["error"])


def a_stream_of_events(doors: Doors, key: dict[str, Any]) -> str:
    with client_of(doors, key) as client, client.stream("POST", "/v1/chat/completions", json=body()) as answer:
        error = told_by_events(answer)
    assert "invalid_api_key" in error
    return error


def a_stream_of_generated_text(doors: Doors, key: dict[str, Any]) -> str:
    path = f"/v2/models/{MODEL}/generate_stream"
    with client_of(doors, key) as client, client.stream("POST", path, json={"text_input": SLOW}) as answer:
        return told_by_events(answer)


def a_whole_answer(doors: Doors, key: dict[str, Any]) -> str:
    with client_of(doors, key) as client:
        answer = client.post("/v1/chat/completions", json=body(stream=False))
    assert answer.status_code == httpx.codes.UNAUTHORIZED
    return answer.text


def a_whole_inference(doors: Doors, key: dict[str, Any]) -> str:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [SLOW]}
    with client_of(doors, key) as client:
        answer = client.post(f"/v2/models/{MODEL}/infer", json={"inputs": [text]})
    assert answer.status_code == httpx.codes.UNAUTHORIZED
    return answer.text


def text_input(text: str) -> list[triton.InferInput]:
    prompt = triton.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return [prompt]


def a_grpc_call(doors: Doors, key: dict[str, Any]) -> str:
    with (
        triton.InferenceServerClient(doors.grpc) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer(MODEL, text_input(SLOW), headers=authorized(key))
    assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
    return str(caught.value.message())


def a_grpc_stream(doors: Doors, key: dict[str, Any]) -> str:
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(doors.grpc) as client:
        client.start_stream(lambda result, error: came.put((result, error)), headers=authorized(key))
        client.async_stream_infer(MODEL, text_input(SLOW))
        told = (came.get(timeout=CALL_WAIT_S)[1] for _ in itertools.count())
        first, last = itertools.islice((error for error in told if error is not None), 2)
    assert last.status() == "StatusCode.UNAUTHENTICATED"
    return str(first.message())  # the request's; then the stream ends


@pytest.mark.parametrize(
    "opened",
    [
        a_stream_of_events,
        a_stream_of_generated_text,
        a_whole_answer,
        a_whole_inference,
        a_grpc_call,
        a_grpc_stream,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_open_ends_and_its_answer_stops(
    stack: RunningStack, doors: Doors, key: dict[str, Any], opened: Opened
) -> None:
    audit = Audit(stack)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(opened, doors, key)
        stack.until(lambda: ending.done() or any(sum(story.stream.accepted) for story in audit.stories().values()))
        assert not ending.done(), ending.result()
        revoke(stack, key)
        assert "revoked" in ending.result(HEARD_S_MAX)
    (story,) = audit.settled(scripted=False).values()
    assert story.endings[0][:2] == ("failed", "invalid_api_key")


def test_a_stream_that_another_has_resumed_ends_for_its_key_alone(
    stack: RunningStack, doors: Doors, key: dict[str, Any]
) -> None:
    other: dict[str, Any] = json.loads(stack.command("tenants", "keys", "add", TENANT, "--json").stdout)
    with client_of(doors, other) as client, client.stream("POST", "/v1/chat/completions", json=body()) as first:
        lines = first.iter_lines()
        next(line for line in lines if "still here" in line)
        with (
            client_of(doors, key) as second,
            second.stream("GET", f"/v1/streams/{first.headers['x-request-id']}") as resumed,
            ThreadPoolExecutor(1) as pool,
        ):
            ending = pool.submit(told_by_events, resumed)
            revoke(stack, key)
            assert "revoked" in ending.result(HEARD_S_MAX)
        for _ in range(2):
            assert "still here" in next(line for line in lines if line.startswith("data: "))


def test_open_sockets_close(stack: RunningStack, key: dict[str, Any]) -> None:
    with socket_of(stack, key) as idle, socket_of(stack, key) as busy:
        busy.send(json.dumps({"type": "request", "id": "1", "endpoint": "chat.completions", "body": body()}))
        while json.loads(busy.recv(CALL_WAIT_S))["type"] != "chunk":
            pass
        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(until_closed, busy, "1"), pool.submit(until_closed, idle)]
            revoke(stack, key)
            heard_s_max = time.monotonic() + HEARD_S_MAX
            for ending in ended:
                assert ending.result(heard_s_max - time.monotonic()) == (1008, "invalid_api_key")


def until_closed(socket: ClientConnection, call_id: str | None = None) -> tuple[int, str]:
    """With what a socket is closed, once its call has heard why, and then itself."""
    if call_id is not None:
        assert "revoked" in until_error(socket, call_id)["error"]["message"]
    assert until_error(socket, None)["error"]["code"] == "invalid_api_key"
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(CALL_WAIT_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_another_key_of_the_tenant_goes_on(stack: RunningStack, key: dict[str, Any]) -> None:
    other: dict[str, Any] = json.loads(stack.command("tenants", "keys", "add", TENANT, "--json").stdout)
    with socket_of(stack, other) as socket:
        revoke(stack, key)
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
        socket.send(json.dumps({"type": "request", "id": "1", "endpoint": "chat.completions", "body": asked}))
        while (message := json.loads(socket.recv(CALL_WAIT_S)))["type"] != "done":
            assert message["type"] != "error", message
