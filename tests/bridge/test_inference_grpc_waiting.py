"""Who may ask by gRPC, and how long what doesn't come is waited for."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import pytest

from bridge.inference import grpc_calls, grpc_server
from bridge.inference.messages import SERVICE
from infra.log import EventProducer
from schemas.errors import HeadraceError
from schemas.events import ApiKey, TenantChanged
from schemas.reasons import Reason
from schemas.topics import TENANTS
from tests.bridge.conftest import KEY, REVOKED, RunningBridge
from tests.bridge.inference_calls import address, five
from tests.bridge.tensors import HANGS


def raw_call(bridge: RunningBridge, body: bytes | None, key: str | None, method: str = "ModelInfer") -> grpc.RpcError:
    """What becomes of one message as it is; None is never sent."""
    sent = threading.Event()

    def messages() -> Iterator[bytes]:
        if body is None:
            sent.wait(30)
        else:
            yield body

    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(address(bridge)) as channel:
        call: Any = channel.stream_unary(f"/{SERVICE}/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            call(messages(), metadata=metadata, timeout=20)
        sent.set()
    return caught.value


def test_nothing_of_a_call_without_a_key_is_read(bridge: RunningBridge) -> None:
    for body in (None, b"\xff no message"):
        for key in (None, "hr-nobody", REVOKED):
            assert raw_call(bridge, body, key).code() is grpc.StatusCode.UNAUTHENTICATED
            assert raw_call(bridge, body, key, "ModelStreamInfer").code() is grpc.StatusCode.UNAUTHENTICATED
    for method in ("ModelInfer", "ModelMetadata", "ModelStreamInfer"):
        assert raw_call(bridge, b"\xff no message", KEY, method).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_that_does_not_come_is_not_waited_for(bridge: RunningBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "BODY_READ_MAX_S", 0.2)
    refused = raw_call(bridge, None, KEY)
    assert (refused.code(), refused.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the message wasn't sent within 0.2 s",
    )


def test_an_idle_stream_ends(bridge: RunningBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "IDLE_MAX_S", 0.2)
    assert raw_call(bridge, None, KEY, "ModelStreamInfer").code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_ends_when_its_key_is_revoked(bridge: RunningBridge) -> None:
    tenant, key = "grpc-revoked", f"hr-grpc-{time.time_ns()}"
    producer = EventProducer(bridge.settings.kafka, "grpc-tests")
    await producer.start()

    async def known(revoked_ms: int | None) -> None:
        api_key = ApiKey("k", hashlib.sha256(key.encode()).hexdigest(), ("interactive",), 1, revoked_ms)
        await producer.send_and_wait(TENANTS, TenantChanged(tenant, "salt", (api_key,), 1), key=tenant)

    await known(None)
    metadata = (("authorization", f"Bearer {key}"),)
    hanging = five(HANGS)
    sent = asyncio.Event()

    async def messages(busy: bool) -> AsyncIterator[bytes]:
        if busy:
            yield hanging.SerializeToString()
        await sent.wait()

    async with grpc.aio.insecure_channel(address(bridge)) as channel:
        metadata_of: Any = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
        while True:
            try:
                await metadata_of(b"", metadata=metadata)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)
        before = set(bridge.responder.seen)
        open_: Any = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        idle, busy = (open_(messages(busy), metadata=metadata, timeout=30) for busy in (False, True))
        reading = asyncio.gather(*(call.read() for call in (idle, busy)), return_exceptions=True)
        await bridge.until(lambda: any(name not in before for name in list(bridge.responder.seen)))
        await known(2)
        await reading
        assert [await call.code() for call in (idle, busy)] == [grpc.StatusCode.UNAUTHENTICATED] * 2
        assert await idle.details() == "the API key was revoked"
        sent.set()
    await producer.stop()


async def test_an_idle_stream_ends_when_the_front_door_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "LOOK_S", 0.01)
    never = asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    door: Any = SimpleNamespace(draining=True)
    service, stream = grpc_server._Service(door, lambda: None), grpc_server._Stream(None, 1.0)
    with pytest.raises(HeadraceError) as caught:
        await service._next(nothing(), stream, set())
    assert caught.value.reason is Reason.UNAVAILABLE
    never.set()


def test_a_long_error_fits_a_trailer() -> None:
    assert grpc_calls.details("x" * 5_000) == "x" * 1_000
    assert len(quote(grpc_calls.details("\U0001f30a" * 5_000))) <= grpc_calls.ERROR_BYTES_MAX
