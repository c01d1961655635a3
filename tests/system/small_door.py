"""The front door of the shared stack as callers of its small models meet it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.system.fixtures_small import PICKING, SmallModels
from tests.system.running import CALL_WAIT_S, RunningStack

INFER = "/inference.GRPCInferenceService/ModelInfer"


def key(stack: RunningStack) -> dict[str, str]:
    return {"Authorization": f"Bearer {stack.keys['acme']}"}


def door(stack: RunningStack, small: SmallModels) -> httpx.Client:
    return httpx.Client(base_url=small.url, headers=key(stack), timeout=CALL_WAIT_S, trust_env=False)


def async_door(stack: RunningStack, small: SmallModels) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=small.url, headers=key(stack), timeout=CALL_WAIT_S, trust_env=False)


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


@pytest.fixture
def http(stack: RunningStack, made: SmallModels) -> Iterator[httpx.Client]:
    """The front door over HTTP, as the tenant `acme` meets it."""
    with httpx.Client(base_url=made.url, headers=key(stack), timeout=CALL_WAIT_S, trust_env=False) as client:
        yield client


@pytest.fixture
def infer(stack: RunningStack, made: SmallModels) -> Iterator[Callable[[Any], Any]]:
    """A request's message by gRPC: what came, an error too."""
    metadata = (("authorization", key(stack)["Authorization"]),)
    with grpc.insecure_channel(made.grpc) as channel:
        call: Any = channel.unary_unary(
            INFER, service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
        )

        def ask(request: Any) -> Any:
            try:
                return call(request, metadata=metadata, timeout=CALL_WAIT_S)
            except grpc.RpcError as error:
                return error

        yield ask


def message(shape: list[int], values: list[int], *, raw: bool) -> Any:
    """A request to `picking` by gRPC."""
    found = service_pb2.ModelInferRequest(model_name=PICKING)
    item = found.inputs.add(name="x", datatype="INT64", shape=shape)
    if raw:
        found.raw_input_contents.append(struct.pack(f"<{len(values)}q", *values))
    else:
        item.contents.int64_contents.extend(values)
    return found
