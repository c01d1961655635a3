"""The rules of every request over the Open Inference Protocol on the whole path, REST and gRPC, unary and on a stream: what the log says of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from cli.models import register_versions, version_of
from cli.records import Read
from infra.models_file import ModelEntry
from schemas.reasons import Reason
from schemas.topics import BATCH, INTERACTIVE, TOKENS, requests_topic, work_topic
from tests import onnx_models
from tests.system.audit import Mark
from tests.system.fixtures_small import PICKING, SmallModels
from tests.system.running import CALL_WAIT_S, RunningStack
from tests.system.small_door import INFER, key, message, tensor

STREAM = INFER.replace("ModelInfer", "ModelStreamInfer")
IDLE = "picking-idle"
"""A model without a worker."""
REST, UNARY, STREAMED = WAYS = ("rest", "unary", "streamed")
TIMEOUT_S = 2.0
_numbers = itertools.count()

Asking = Callable[..., tuple[str, list[float], dict[str, Any]]]
"""Asks a model for the table's element at an index: the reason of a failure or "", what came, and what was told beside it."""


def new_key() -> str:
    return f"rules {time.time_ns()} {next(_numbers)}"


def by_rest(http: httpx.Client, model: str, index: int, **parameters: Any) -> tuple[str, list[float], dict[str, Any]]:
    body = {"inputs": [tensor("x", "INT64", [1, 1], [index])], "parameters": parameters}
    answer = http.post(f"/v2/models/{model}/infer", json=body)
    if not answer.is_success:
        reasons = {409: "conflict", 503: "unavailable", 504: "deadline_exceeded"}
        return reasons[answer.status_code], [], dict(answer.headers)
    return "", answer.json()["outputs"][0]["data"], dict(answer.headers)


def asked(model: str, index: int, parameters: dict[str, Any]) -> Any:
    """A request's message."""
    found = message([1, 1], [index], raw=True)
    found.model_name, found.id = model, "mine"
    for name, value in parameters.items():
        setattr(found.parameters[name], "int64_param" if isinstance(value, int) else "string_param", value)
    return found


def metadata_of(call: Any) -> dict[str, Any]:
    return {each.key: each.value for each in call.trailing_metadata() or ()}


def by_unary(call: Any, metadata: Any, model: str, index: int, **parameters: Any) -> tuple[str, list[float], dict[str, Any]]:  # fmt: skip
    try:
        answer, made = call.with_call(asked(model, index, parameters), metadata=metadata, timeout=CALL_WAIT_S)
    except grpc.RpcError as error:
        failed, told = error, metadata_of(error)
    else:
        values = np.frombuffer(answer.raw_output_contents[0], "<f4").tolist()
        return "", values, metadata_of(made)
    reason = told["headrace-reason"]
    assert failed.code() is grpc.StatusCode[Reason(reason).grpc_code]
    return reason, [], told


def by_stream(call: Any, metadata: Any, model: str, index: int, **parameters: Any) -> tuple[str, list[float], dict[str, Any]]:  # fmt: skip
    (answer,) = call(iter([asked(model, index, parameters)]), metadata=metadata, timeout=CALL_WAIT_S)
    found = answer.infer_response
    told = {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in found.parameters.items()}
    told["x-request-id"] = told.get("request_id", "")
    if told.get("replayed"):
        told["idempotent-replayed"] = "true"
    if answer.error_message:
        return str(told["headrace-reason"]), [], told
    return "", np.frombuffer(found.raw_output_contents[0], "<f4").tolist(), told


@pytest.fixture
def ways(stack: RunningStack, made: SmallModels, http: httpx.Client) -> Iterator[dict[str, Asking]]:
    """Each way to ask."""
    metadata = (("authorization", key(stack)["Authorization"]),)
    send = service_pb2.ModelInferRequest.SerializeToString
    with grpc.insecure_channel(made.grpc) as channel:
        one: Any = channel.unary_unary(INFER, send, service_pb2.ModelInferResponse.FromString)
        many: Any = channel.stream_stream(STREAM, send, service_pb2.ModelStreamInferResponse.FromString)
        yield {
            REST: lambda *given, **more: by_rest(http, *given, **more),
            UNARY: lambda *given, **more: by_unary(one, metadata, *given, **more),
            STREAMED: lambda *given, **more: by_stream(many, metadata, *given, **more),
        }


@pytest.fixture(scope="module")
def idle(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is deployed, and that nobody serves."""
    folder: Path = onnx_models.picking(tmp_path_factory.mktemp("idle") / IDLE)
    entry = ModelEntry(IDLE, "1", "onnx", str(folder), 512)
    stack.thread.run(register_versions(stack.kafka, [version_of(entry, stack.data_dir, lambda _text: None)]))
    return IDLE


def named(records: list[Read], what: str, topic: str) -> list[str]:
    """The requests of which this is told on topics whose names begin so."""
    found = (item for item in records if item.name == what and item.topic.startswith(topic))
    return [str(getattr(item.event, "request_id", "")) for item in found]


@pytest.mark.parametrize("first", WAYS)
def test_a_repeat_is_answered_by_the_first_and_computed_once(
    stack: RunningStack, ways: dict[str, Asking], first: str
) -> None:
    """Whichever way it is asked again; with another body it is refused."""
    mark = Mark(stack, "requests.", "work.", "tokens", "lifecycle")
    own = new_key()
    reason, values, told = ways[first](PICKING, 1, idempotency_key=own)
    assert (reason, values, "idempotent-replayed" in told) == ("", [20.0], False)
    request_id = told["x-request-id"]
    for way in WAYS:
        reason, values, told = ways[way](PICKING, 1, idempotency_key=own)
        assert (reason, values) == ("", [20.0])
        assert (told["x-request-id"], told["idempotent-replayed"]) == (request_id, "true")
        reason, _, _ = ways[way](PICKING, 2, idempotency_key=own)
        assert reason == "conflict"
    stack.ended(request_id)
    records = mark.records()
    assert len(set(named(records, "InferenceRequested", "requests."))) == 1 + 2 * len(WAYS)
    assert named(records, "InferenceScheduled", "work.") == [request_id]
    assert named(records, "InferenceAdmitted", "lifecycle") == [request_id]
    assert named(records, "GenerationStarted", TOKENS) == [request_id]
    assert named(records, "InferenceCompleted", TOKENS) == [request_id]
    assert len(named(records, "InferenceJoined", "lifecycle")) == len(WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_a_tier_is_that_of_the_topics(stack: RunningStack, ways: dict[str, Asking], way: str) -> None:
    for tier, wish in ((BATCH, {"tier": BATCH}), (BATCH, {"priority": 2}), (INTERACTIVE, {"tier": INTERACTIVE})):
        mark = Mark(stack, "requests.", "work.")
        reason, values, told = ways[way](PICKING, 0, **wish)
        assert (reason, values) == ("", [10.0])
        topics = [
            item.topic for item in mark.records() if getattr(item.event, "request_id", "") == told["x-request-id"]
        ]
        assert sorted(topics) == sorted([requests_topic(tier), work_topic(PICKING, "1", tier)])


@pytest.mark.parametrize("way", WAYS)
def test_who_is_late_without_a_worker_hears_of_the_deadline_and_nothing_runs(
    stack: RunningStack, ways: dict[str, Asking], idle: str, way: str
) -> None:
    mark = Mark(stack, "tokens", "lifecycle")
    began_s = time.monotonic()
    reason, _, told = ways[way](idle, 1, timeout=int(TIMEOUT_S * 1_000_000))
    assert TIMEOUT_S - 0.1 <= time.monotonic() - began_s < CALL_WAIT_S / 2
    assert reason == "deadline_exceeded"
    stack.ended(told["x-request-id"])
    assert not named(mark.records(), "GenerationStarted", "")
