"""Whoever calls over gRPC is found once for each call, by a service without a broker."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from bridge.auth import Caller
from bridge.inference.grpc_server import GrpcServer
from bridge.inference.messages import SERVICE, message

ADDRESS, KEY = "127.0.0.1", "hr-anybody"
KEYED = ("ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer", "RepositoryIndex")


class Door:
    """Who calls is known to it, and no model is."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(
            body_bytes_max=1_000, open_requests_max=8, reader_stall_ms=1_000, socket_requests_max=8
        )
        self.models = SimpleNamespace(resolve=lambda _name: None, all=lambda: ())
        self.auth, self.draining = self, False
        self.found: list[str] = []

    async def from_headers(self, headers: Mapping[str, str]) -> Caller:
        self.found.append(headers["authorization"])
        return Caller("acme", "k1", ("interactive",))

    def serve(self, _caller: Caller, _end: Any) -> None: ...

    def served(self, _caller: Caller, _end: Any) -> None: ...


@pytest.mark.parametrize("method", [*KEYED, "ModelStreamInfer"])
async def test_a_call_finds_its_caller_once(method: str) -> None:
    door: Any = Door()
    server = GrpcServer(door, lambda: None)
    port = await server.start(ADDRESS, 0)
    async with grpc.aio.insecure_channel(f"{ADDRESS}:{port}") as channel:
        streams = method == "ModelStreamInfer"
        infers = method in ("ModelInfer", "ModelStreamInfer")
        request = message("ModelInferRequest")(model_name="m") if infers else message(f"{method}Request")()
        call: Any = (channel.stream_stream if streams else channel.stream_unary)(f"/{SERVICE}/{method}")
        asked = call(iter([request.SerializeToString()]), metadata=(("authorization", f"Bearer {KEY}"),))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await (asked.read() if streams else asked)
        assert await asked.code() in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND), "a model that isn't there"
    await server.stop(0)
    assert door.found == [f"Bearer {KEY}"]
