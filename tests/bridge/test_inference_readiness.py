"""A model is ready while a worker of the version that serves it is: over REST, gRPC and in the repository's index."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from bridge.inference.messages import SERVICE
from bridge.inference.models import Readiness
from infra.directory import ModelDirectory, WorkerDirectory
from infra.settings import BridgeSettings, KafkaSettings
from schemas.events import ModelPromoted, ModelVersionRegistered
from tests.bridge.conftest import KEY, RunningBridge
from tests.bridge.reporting import report, says_ready, until, worker_of
from tests.bridge.responder import VERSION
from tests.bridge.tensors import identity

AUTH = {"authorization": f"Bearer {KEY}"}
MODEL = identity("INT16")
"""No other test reports workers of it."""
REGISTERED = ModelVersionRegistered("m", VERSION, "scripted", "", 100)
STALE_MS = 60_000

Told = tuple[bool, bool, tuple[str, str], tuple[str, str]]
READY: Told = (True, True, ("READY", ""), ("READY", ""))


@pytest.fixture(scope="module")
def over_http(bridge: RunningBridge) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(bridge.url.removeprefix("http://"), network_timeout=30) as found:
        yield found


@pytest.fixture(scope="module")
def over_grpc(bridge: RunningBridge) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{bridge.settings.grpc_port}") as found:
        yield found


@pytest.fixture
def told(
    over_http: triton_http.InferenceServerClient, over_grpc: triton_grpc.InferenceServerClient
) -> Callable[[], Told]:
    """What each protocol says of the model: whether it is ready, and its state and reason in the index."""

    def ask() -> Told:
        listed = {item["name"]: item for item in over_http.get_model_repository_index(headers=dict(AUTH))}[MODEL]
        told = {item.name: item for item in over_grpc.get_model_repository_index(headers=AUTH).models}[MODEL]
        return (
            over_http.is_model_ready(MODEL, VERSION, headers=dict(AUTH)),
            over_grpc.is_model_ready(MODEL, VERSION, headers=AUTH),
            (listed["state"], listed["reason"]),
            (told.state, told.reason),
        )

    return ask


def unavailable(reason: str) -> Told:
    return False, False, ("UNAVAILABLE", reason), ("UNAVAILABLE", reason)


def test_a_model_is_ready_while_a_worker_of_it_is(bridge: RunningBridge, told: Callable[[], Told]) -> None:
    assert told() == unavailable("no worker is ready")
    with worker_of(bridge, MODEL, "starting"):
        until(lambda: told() == unavailable("no worker is ready (1 starting)"))
        with worker_of(bridge, MODEL):
            until(lambda: told() == READY)
        until(lambda: told() == unavailable("no worker is ready (1 starting)"))
    until(lambda: told() == unavailable("no worker is ready"))


def test_a_worker_of_another_version_makes_a_model_no_readier(bridge: RunningBridge, told: Callable[[], Told]) -> None:
    with worker_of(bridge, MODEL, version="another"), worker_of(bridge, MODEL, "draining"):
        until(lambda: told() == unavailable("no worker is ready (1 draining)"))
    until(lambda: told() == unavailable("no worker is ready"))


def test_who_asks_for_what_is_ready_gets_nothing_else(bridge: RunningBridge) -> None:
    def names(*, ready: bool) -> list[set[str]]:
        over_http = httpx.post(f"{bridge.url}/v2/repository/index", json={"ready": ready}, headers=AUTH).json()
        with grpc.insecure_channel(f"127.0.0.1:{bridge.settings.grpc_port}") as channel:
            index = channel.unary_unary(
                f"/{SERVICE}/RepositoryIndex",
                service_pb2.RepositoryIndexRequest.SerializeToString,
                service_pb2.RepositoryIndexResponse.FromString,
            )
            asked = service_pb2.RepositoryIndexRequest(ready=ready)
            over_grpc = index(asked, metadata=tuple(AUTH.items())).models
        return [{item["name"] for item in over_http}, {item.name for item in over_grpc}]

    assert all(MODEL in found for found in names(ready=False))
    assert all(MODEL not in found for found in names(ready=True))
    with worker_of(bridge, MODEL):
        until(lambda: says_ready(bridge, MODEL))
        assert all(MODEL in found for found in names(ready=True))
    until(lambda: not says_ready(bridge, MODEL))


def test_a_request_is_taken_while_no_worker_is_ready(over_http: triton_http.InferenceServerClient) -> None:
    assert not over_http.is_model_ready(MODEL, headers=dict(AUTH))
    x = triton_http.InferInput("x", [1, 2], "INT16")
    x.set_data_from_numpy(np.array([[1, 2]], np.int16))
    assert over_http.infer(MODEL, [x], headers=dict(AUTH)).as_numpy("y").tolist() == [[1, 2]]


def test_a_call_loads_and_unloads_nothing_and_hears_what_does(
    over_http: triton_http.InferenceServerClient, over_grpc: triton_grpc.InferenceServerClient, bridge: RunningBridge
) -> None:
    """A call that asks for a file of many megabytes is refused before it is read."""
    files = {"file:1/model.onnx": b"0" * (16 << 20)}
    for client, status, denied in (
        (over_http, "405", "401"),
        (over_grpc, "StatusCode.UNIMPLEMENTED", "StatusCode.UNAUTHENTICATED"),
    ):
        assert "model_repository" in str(client.get_server_metadata(headers=dict(AUTH)))
        for call in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match=r"by their workers.*headrace worker MODEL") as refused:
                call(MODEL, headers=dict(AUTH))
            assert refused.value.status() == status
            with pytest.raises(InferenceServerException) as unknown:
                call(MODEL)
            assert unknown.value.status() == denied
    with pytest.raises(InferenceServerException, match="by their workers"):
        over_grpc.load_model(MODEL, headers=AUTH, config="{}", files=files)
    answer = httpx.post(f"{bridge.url}/v2/repository/models/{MODEL}/load", content=files.popitem()[1], headers=AUTH)
    assert (answer.status_code, answer.headers["allow"], list(answer.json())) == (405, "", ["error"])


def test_workers_reports_grow_old_without_newer_ones() -> None:
    assert readiness(age_ms=0).why_not(REGISTERED) is None
    old = readiness(age_ms=STALE_MS + 1)
    assert old.why_not(REGISTERED) == "no worker is ready (1 silent)"
    assert old.server


def test_nothing_is_ready_at_a_front_door_that_takes_no_calls() -> None:
    stopping = readiness(age_ms=0, not_ready="stopping")
    assert stopping.why_not(REGISTERED) == "stopping"
    told = {"name": "m", "version": VERSION, "state": "UNAVAILABLE", "reason": "stopping"}
    assert stopping.index(ready_only=False) == [told]
    assert stopping.index(ready_only=True) == []
    assert not stopping.server


def readiness(age_ms: int, not_ready: str | None = None) -> Readiness:
    """Of a front door that knows one model, and one ready worker that reported so long ago."""
    models, workers = ModelDirectory(KafkaSettings()), WorkerDirectory(KafkaSettings())
    record: Any = SimpleNamespace(timestamp=int(time.time() * 1000) - age_ms)
    models._on_event(REGISTERED, record)
    models._on_event(ModelPromoted("m", VERSION), record)
    workers._on_event(report("w", "m", "ready"), record)
    door: Any = SimpleNamespace(models=models, workers=workers, settings=BridgeSettings(worker_stale_ms=STALE_MS))
    return Readiness(door, lambda: not_ready)
