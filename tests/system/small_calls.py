"""One request for tensors by each of the clients that callers have: Triton's over HTTP and gRPC, KServe's over REST and gRPC, plain JSON, and typed messages by gRPC."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.bridge.inference_calls import TYPED
from tests.system.fixtures_small import SmallModels
from tests.system.kserve_asks import as_json, of_json
from tests.system.running import CALL_WAIT_S, ROOT
from workers.engines.arrays import DTYPES

TRITON_HTTP, TRITON_JSON, TRITON_GRPC = "triton http", "triton json", "triton grpc"
KSERVE_REST, KSERVE_JSON, KSERVE_GRPC = "rest", "rest json", "grpc"
JSON, TYPED_GRPC = "json", "typed grpc"
TRITONS = (TRITON_HTTP, TRITON_JSON, TRITON_GRPC)
KSERVES = (KSERVE_REST, KSERVE_JSON, KSERVE_GRPC)
KSERVE_WAIT_S = 120.0
FIELDS = {datatype: field for datatype, field, _ in TYPED}
"""By datatype, the field of a message's contents."""
WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


@dataclass(frozen=True)
class Ask:
    """Inputs by name, each a datatype and an array; elements of BYTES are bytes."""

    model: str
    inputs: Mapping[str, tuple[str, Any]]
    outputs: Sequence[str]


def asked(small: SmallModels, key: str, client: str, ask: Ask) -> dict[str, Any]:
    """The outputs as the client gives them, by name."""
    if client == TRITON_GRPC:
        return _triton_grpc(small, key, ask)
    if client == TYPED_GRPC:
        return _typed_grpc(small, key, ask)
    if client == JSON:
        return _json(small, key, ask)
    return _triton_http(small, key, ask, binary=client == TRITON_HTTP)


def _triton_http(small: SmallModels, key: str, ask: Ask, *, binary: bool) -> dict[str, Any]:
    inputs = []
    for name, (datatype, array) in ask.inputs.items():
        item = http_client.InferInput(name, list(array.shape), datatype)
        item.set_data_from_numpy(array, binary_data=binary)
        inputs.append(item)
    wanted = [http_client.InferRequestedOutput(name, binary_data=binary) for name in ask.outputs]
    headers = {"Authorization": f"Bearer {key}", "Cache-Control": "no-cache"}
    with http_client.InferenceServerClient(
        small.url.removeprefix("http://"), network_timeout=CALL_WAIT_S, connection_timeout=CALL_WAIT_S
    ) as client:
        found = client.infer(ask.model, inputs, outputs=wanted, headers=headers)
    return {name: found.as_numpy(name) for name in ask.outputs}


def _triton_grpc(small: SmallModels, key: str, ask: Ask) -> dict[str, Any]:
    inputs = []
    for name, (datatype, array) in ask.inputs.items():
        item = grpc_client.InferInput(name, list(array.shape), datatype)
        item.set_data_from_numpy(array)
        inputs.append(item)
    wanted = [grpc_client.InferRequestedOutput(name) for name in ask.outputs]
    headers = {"authorization": f"Bearer {key}", "cache-control": "no-cache"}
    with grpc_client.InferenceServerClient(small.grpc) as client:
        found = client.infer(ask.model, inputs, outputs=wanted, headers=headers)
    return {name: found.as_numpy(name) for name in ask.outputs}


def _typed_grpc(small: SmallModels, key: str, ask: Ask) -> dict[str, Any]:
    """As the messages are, and nothing raw."""
    request = service_pb2.ModelInferRequest(model_name=ask.model)
    for name, (datatype, array) in ask.inputs.items():
        item = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        getattr(item.contents, FIELDS[datatype]).extend(array.ravel().tolist())
    for name in ask.outputs:
        request.outputs.add(name=name)
    with grpc.insecure_channel(small.grpc) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {key}"), ("cache-control", "no-cache"))
        answer = stub.ModelInfer(request, metadata=metadata, timeout=CALL_WAIT_S)
    assert not answer.raw_output_contents
    return {
        item.name: np.array(
            list(getattr(item.contents, FIELDS[item.datatype])),
            object if item.datatype == "BYTES" else DTYPES[item.datatype],
        ).reshape(item.shape)
        for item in answer.outputs
    }


def _json(small: SmallModels, key: str, ask: Ask) -> dict[str, Any]:
    """As somebody writes it who has no client: NaN and infinity are words."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": array.shape, "data": [_plain(each) for each in array.ravel()]}
        for name, (datatype, array) in ask.inputs.items()
    ]
    body = {"inputs": inputs, "outputs": [{"name": name} for name in ask.outputs]}
    answer = httpx.post(
        f"{small.url}/v2/models/{ask.model}/infer",
        json=body,
        headers={"Authorization": f"Bearer {key}", "Cache-Control": "no-cache"},
        timeout=CALL_WAIT_S,
        trust_env=False,
    )
    assert answer.status_code == httpx.codes.OK, answer.text

    def no_such(word: str) -> Any:
        raise AssertionError(f"{word} isn't JSON")

    found = json.loads(answer.content, parse_constant=no_such)
    kinds = {name: np.asarray(array).dtype for name, (_, array) in ask.inputs.items()}
    return {
        item["name"]: np.array(item["data"], kinds.get(item["name"].removesuffix("_back"))).reshape(item["shape"])
        for item in found["outputs"]
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    plain = value.item()
    return WORDS.get(str(plain), plain)


def kserves(small: SmallModels, key: str, asks: Iterable[tuple[str, Ask]]) -> list[dict[str, Any]]:
    """The outputs of each, with KServe's client over the first of the pair: all in one process, which takes seconds to start."""
    told = [
        {
            "how": how,
            "model": ask.model,
            "inputs": {name: as_json(array, datatype) for name, (datatype, array) in ask.inputs.items()},
            "outputs": list(ask.outputs),
        }
        for how, ask in asks
    ]
    given = json.dumps({"url": small.url, "grpc": small.grpc, "key": key, "asks": told})
    argv = [sys.executable, str(Path(__file__).with_name("kserve_asks.py"))]
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        argv, input=given, cwd=ROOT, env=env, capture_output=True, text=True, timeout=KSERVE_WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return [{name: of_json(each) for name, each in answer.items()} for answer in json.loads(done.stdout)]
