"""The protocol over gRPC, by Triton's own client and by hand, on a real broker."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from bridge.inference import messages
from schemas.tensors import DATATYPES
from schemas.topics import BATCH, requests_topic
from tests.bridge.conftest import BATCH_ONLY, MODEL, RunningBridge
from tests.bridge.inference_calls import AUTH, METADATA, TYPED, address, five, request, sample
from tests.bridge.reporting import ready_workers
from tests.bridge.tensors import FAILS, FAULT, FILES, HANGS, RANKS, SUM, identity


@pytest.fixture(scope="module")
def client(bridge: RunningBridge) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address(bridge)) as found:
        yield found


@pytest.fixture(scope="module")
def infer(bridge: RunningBridge) -> Iterator[Any]:
    """`ModelInfer` as the messages are, by Triton's own copy of them."""
    with grpc.insecure_channel(address(bridge)) as channel:
        yield channel.unary_unary(
            f"/{messages.SERVICE}/ModelInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_raw_as_tritons_client_sends_and_reads_it(
    client: triton.InferenceServerClient, datatype: str
) -> None:
    values = sample(datatype)
    x = triton.InferInput("x", list(values.shape), datatype)
    x.set_data_from_numpy(values)
    wanted = [triton.InferRequestedOutput("y")]
    answer = client.infer(identity(datatype), [x], outputs=wanted, request_id="mine", headers=AUTH)
    found = answer.as_numpy("y")
    if datatype == "BYTES":
        found = np.vectorize(bytes.decode, otypes=[object])(found)
    assert answer.get_response().id == "mine"
    assert found.shape == values.shape
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(("datatype", "field", "values"), TYPED)
def test_typed_contents_are_answered_by_typed_contents(
    infer: Any, datatype: str, field: str, values: list[Any]
) -> None:
    answer = infer(request(identity(datatype), x=(datatype, [1, 2], {field: values})), metadata=METADATA)
    assert list(getattr(answer.outputs[0].contents, field)) == values
    assert (answer.id, answer.model_version, list(answer.raw_output_contents)) == ("mine", "v1", [])


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("INT8", "int_contents", [1, 128]), ("UINT8", "uint_contents", [1, 256]), ("INT16", "int_contents", [1, 1 << 20]),
        ("INT8", "uint_contents", [1, 2]), ("FP16", "fp32_contents", [1, 2]), ("BF16", "fp32_contents", [1, 2]),
        ("INT32", "int_contents", [1, 2, 3]), ("FP32", "fp32_contents", []), ("WHAT", "fp32_contents", [1, 2]),
        ("BYTES", "bytes_contents", [b"a", b"\xff\x00a"]),
    ],
)  # fmt: skip
def test_contents_that_do_not_fit_are_refused(
    infer: Any, bridge: RunningBridge, datatype: str, field: str, values: list[Any]
) -> None:
    before = len(bridge.responder.seen)
    model = identity(datatype) if datatype in DATATYPES else identity("FP32")
    with pytest.raises(grpc.RpcError) as caught:
        infer(request(model, x=(datatype, [1, 2], {field: values})), metadata=METADATA)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(bridge.responder.seen) == before


def test_several_inputs_ranks_and_parameters(client: triton.InferenceServerClient) -> None:
    a, b = (triton.InferInput(name, [2, 3], "FP32") for name in "ab")
    for tensor in (a, b):
        tensor.set_data_from_numpy(np.ones((2, 3), np.float32))
    wanted = [triton.InferRequestedOutput("total"), triton.InferRequestedOutput("rows")]
    answer = client.infer(SUM, [b, a], outputs=wanted, headers=AUTH)
    assert [output.name for output in answer.get_response().outputs] == ["total", "rows"]
    assert (answer.as_numpy("total").tolist(), answer.as_numpy("rows").tolist()) == ([[2.0] * 3] * 2, [2])
    cube, scalar = triton.InferInput("cube", [2, 0, 2], "INT8"), triton.InferInput("scalar", [], "INT8")
    cube.set_data_from_numpy(np.zeros((2, 0, 2), np.int8))
    scalar.set_data_from_numpy(np.array(7, np.int8))
    answer = client.infer(RANKS, [cube, scalar], headers=AUTH)
    assert (answer.as_numpy("cube").shape, answer.as_numpy("scalar").tolist()) == ((2, 0, 2), 7)
    files = triton.InferInput("bytes", [1], "BYTES")
    files.set_data_from_numpy(np.array([b"\xff\xd8"], dtype=object))
    answer = client.infer(FILES, [files], headers=AUTH, parameters={"top_k": 1})
    assert answer.as_numpy("label").tolist() == [[b"short"]]


def test_what_is_served(client: triton.InferenceServerClient, bridge: RunningBridge) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    with ready_workers(bridge, SUM, MODEL):
        assert client.is_model_ready(SUM, headers=AUTH)
        assert not client.is_model_ready("nobody", headers=AUTH)
        assert not client.is_model_ready(SUM, "v2", headers=AUTH)
        index = {item.name: item.state for item in client.get_model_repository_index(headers=AUTH).models}
        assert index[SUM] == index[MODEL] == "READY"
    assert client.get_server_metadata(headers=AUTH).name == "headrace"
    metadata = client.get_model_metadata(SUM, headers=AUTH)
    assert [(spec.name, list(spec.shape)) for spec in metadata.inputs] == [("a", [-1, 3]), ("b", [-1, 3])]
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_metadata(SUM, "v2", headers=AUTH)
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_metadata(SUM)
    assert caught.value.status() == "StatusCode.UNAUTHENTICATED"


def test_errors_have_the_code_of_their_reason(infer: Any) -> None:
    def code(asked: Any, metadata: Any = METADATA) -> tuple[grpc.StatusCode, str | None]:
        with pytest.raises(grpc.RpcError) as caught:
            infer(asked, metadata=metadata)
        return caught.value.code(), caught.value.details()

    assert code(five(FAILS)) == (grpc.StatusCode.INTERNAL, FAULT)
    assert code(five(HANGS, 7))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert code(five("nobody"))[0] is grpc.StatusCode.NOT_FOUND
    assert code(five(HANGS), ())[0] is grpc.StatusCode.UNAUTHENTICATED
    assert code(five(HANGS), (("authorization", f"Bearer {BATCH_ONLY}"),))[0] is grpc.StatusCode.PERMISSION_DENIED
    twice = five(HANGS)
    twice.raw_input_contents.append(bytes(20))
    assert code(twice)[0] is grpc.StatusCode.INVALID_ARGUMENT
    unknown = five(HANGS)
    unknown.parameters["temperature"].double_param = 0.5
    assert code(unknown)[0] is grpc.StatusCode.INVALID_ARGUMENT
    streams = request(
        MODEL, text_input=("BYTES", [1], {"bytes_contents": [b"a"]}), stream=("BOOL", [1], {"bool_contents": [True]})
    )
    assert code(streams)[0] is grpc.StatusCode.INVALID_ARGUMENT
    large = request(identity("BYTES"), x=("BYTES", [1, 1], {"bytes_contents": [bytes(9 * 1024 * 1024)]}))
    assert code(large)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_parameters_and_headers_travel(infer: Any, bridge: RunningBridge) -> None:
    asked = five(FAILS)
    asked.parameters["timeout"].int64_param = 2_000_000
    asked.parameters["priority"].uint64_param = 3
    with pytest.raises(grpc.RpcError):
        infer(asked, metadata=METADATA, timeout=30)
    seen = max((seen for seen in bridge.responder.seen.values()), key=lambda seen: seen.event.request_id)
    assert (seen.event.timeout_ms, seen.topic) == (2_000, requests_topic(BATCH))
    key = (("idempotency-key", f"grpc-{time.time_ns()}"),)
    x = request(identity("INT8"), x=("INT8", [1, 1], {"int_contents": [5]}))
    first, second = (infer(x, metadata=METADATA + key) for _ in range(2))
    assert list(first.outputs[0].contents.int_contents) == list(second.outputs[0].contents.int_contents) == [5]


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_leaves_cancels(infer: Any, bridge: RunningBridge, how: str) -> None:
    before = set(bridge.responder.seen)
    call = infer.future(five(HANGS), metadata=METADATA, timeout=1 if how == "deadline" else 60)
    new: list[str] = []

    def asked() -> bool:
        new[:] = [
            key for key, seen in list(bridge.responder.seen.items()) if key not in before and seen.event.model == HANGS
        ]
        return bool(new)

    await bridge.until(asked)
    if how == "cancel":
        call.cancel()
    await bridge.until(lambda: new[0] in bridge.responder.cancelled)


# --- streams ----------------------------------------------------------------------------------------------------------


def text_inputs(text: str, stream: bool = True) -> list[triton.InferInput]:
    prompt, streams = triton.InferInput("text_input", [1], "BYTES"), triton.InferInput("stream", [1], "BOOL")
    prompt.set_data_from_numpy(np.array([text.encode()], dtype=object))
    streams.set_data_from_numpy(np.array([stream]))
    return [prompt, streams]


def streamed(
    client: triton.InferenceServerClient, asked: dict[str, tuple[str, list[triton.InferInput]]]
) -> dict[str, list[Any]]:
    """All requests on one stream; what came for each, until each had its last part or its error."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    found: dict[str, list[Any]] = {name: [] for name in asked}
    client.start_stream(lambda result, error: came.put((result, error)), headers=AUTH)
    try:
        for name, (model, inputs) in asked.items():
            client.async_stream_infer(model, inputs, request_id=name, enable_empty_final_response=True)
        left = set(asked)
        while left:
            result, error = came.get(timeout=30)
            if error is not None:  # Triton's client doesn't say whose it is
                found["bad"].append(error)
                left.discard("bad")
                continue
            response = result.get_response()
            found[response.id].append(result)
            if response.parameters["triton_final_response"].bool_param:
                left.discard(response.id)
    finally:
        client.stop_stream()
    return found


def test_tokens_of_a_language_model_stream(client: triton.InferenceServerClient) -> None:
    script = json.dumps({"tokens": ["a", "ä", "c"], "gap_ms": 40})
    parts = streamed(client, {"one": (MODEL, text_inputs(script))})["one"]
    assert len(parts) > 1
    assert b"".join(part.as_numpy("text_output")[0] for part in parts) == "aäc".encode()
    assert [part.as_numpy("finish_reason")[0] for part in parts][-1] == b"stop"
    assert parts[-1].get_response().parameters["completion_tokens"].int64_param == 3


def test_without_a_stream_a_long_answer_has_one_part(client: triton.InferenceServerClient) -> None:
    """A worker tells of it before its end, too; the prompt, which a whole answer begins with, would be told each time."""
    script = json.dumps({"tokens": ["a", "b", "c"], "gap_ms": 40})
    (whole,) = streamed(client, {"whole": (MODEL, text_inputs(script, stream=False))})["whole"]
    assert whole.as_numpy("text_output").tolist() == [f"{script}abc".encode()]
    assert whole.get_response().parameters["completion_tokens"].int64_param == 3


def test_several_requests_share_a_stream_and_one_fails_alone(client: triton.InferenceServerClient) -> None:
    x = triton.InferInput("x", [1, 2], "INT8")
    x.set_data_from_numpy(np.array([[1, 2]], np.int8))
    slow = json.dumps({"tokens": ["s", "l"], "gap_ms": 200})
    fives = triton.InferInput("x", [1, 5], "FP32")
    fives.set_data_from_numpy(np.ones((1, 5), np.float32))
    asked = {
        "slow": (MODEL, text_inputs(slow)),
        "whole": (MODEL, text_inputs("abc", stream=False)),
        "tensor": (identity("INT8"), [x]),
        "bad": (FAILS, [fives]),
    }
    found = streamed(client, asked)
    assert b"".join(part.as_numpy("text_output")[0] for part in found["slow"]) == b"sl"
    assert [part.as_numpy("text_output")[0] for part in found["whole"]] == [b"abcabc"]
    assert found["tensor"][0].as_numpy("y").tolist() == [[1, 2]]
    assert [error.message() for error in found["bad"]] == [FAULT]


async def test_a_stream_that_is_cancelled_cancels_its_requests(
    client: triton.InferenceServerClient, bridge: RunningBridge
) -> None:
    before = set(bridge.responder.seen)
    client.start_stream(lambda result, error: None, headers=AUTH)
    for _ in range(2):
        client.async_stream_infer(MODEL, text_inputs('{"hang": true, "mark": "stream"}'))
    new: list[str] = []

    def asked() -> bool:
        new[:] = [key for key, seen in list(bridge.responder.seen.items()) if key not in before and seen.event.prompt]
        return len(new) == 2

    await bridge.until(asked)
    client.stop_stream(cancel_requests=True)
    await bridge.until(lambda: set(new) <= set(bridge.responder.cancelled))


# --- the messages -----------------------------------------------------------------------------------------------------


def shape_of(descriptor: Any) -> dict[str, Any]:
    """A message's fields as they are on the wire, without the maps' own entries."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.full_name,
        )
        for field in descriptor.fields
    }


@pytest.mark.parametrize("name", [name for name in messages._MESSAGES if "." not in name])
def test_messages_are_the_published_ones(name: str) -> None:
    """Triton's client carries Triton's own description, which has the protocol's messages and a few fields more."""
    theirs, ours = getattr(service_pb2, name).DESCRIPTOR, messages.message(name).DESCRIPTOR
    pairs = [(theirs, ours)]
    while pairs:
        published, own = pairs.pop()
        assert shape_of(own).items() <= shape_of(published).items()
        assert {f.name for f in published.fields} == {f.name for f in own.fields}
        pairs += [(published.nested_types_by_name[nested.name], nested) for nested in own.nested_types]
