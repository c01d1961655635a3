"""The protocol over REST, by Triton's own client and by hand, on a real broker."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given, settings
from tritonclient.utils import InferenceServerException

from bridge.inference import serving
from bridge.inference.rest_requests import LENGTH_HEADER
from decisions import validation
from decisions.signature import input_problem
from schemas.tensors import DATATYPES, not_text
from schemas.topics import BATCH, INTERACTIVE, requests_topic
from tests.bridge.conftest import BATCH_ONLY, MODEL, RunningBridge
from tests.bridge.inference_calls import auth, body, sample
from tests.bridge.reporting import ready_workers
from tests.bridge.tensors import FAILS, FAULT, FILES, HANGS, RANKS, SUM, identity
from tests.bridge.test_inference_elements import tensors


@pytest.fixture(scope="module")
def client(bridge: RunningBridge) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(bridge.url.removeprefix("http://"), network_timeout=30) as found:
        yield found


FORMS = [
    (datatype, *form) for datatype in DATATYPES for form in ((True, True), (True, False), (False, True), (False, False))
]


@pytest.mark.parametrize(
    ("datatype", "binary_in", "binary_out"),
    [form for form in FORMS if form[0] != "BF16" or all(form[1:])],  # which has no form in JSON
)
def test_every_datatype_as_tritons_client_sends_and_reads_it(
    client: triton.InferenceServerClient, datatype: str, binary_in: bool, binary_out: bool
) -> None:
    values = sample(datatype)
    x = triton.InferInput("x", list(values.shape), datatype)
    x.set_data_from_numpy(values, binary_data=binary_in)
    wanted = [triton.InferRequestedOutput("y", binary_data=binary_out)]
    answer = client.infer(identity(datatype), [x], outputs=wanted, request_id="mine", headers=auth())
    assert answer.get_response()["id"] == "mine"
    found = answer.as_numpy("y")
    if datatype == "BYTES":
        found = np.vectorize(lambda item: item.decode() if isinstance(item, bytes) else item, otypes=[object])(found)
    assert found.shape == values.shape
    np.testing.assert_array_equal(found, values)


def test_mixed_inputs_and_outputs_in_their_order(client: triton.InferenceServerClient) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    a, b = triton.InferInput("a", [2, 3], "FP32"), triton.InferInput("b", [2, 3], "FP32")
    a.set_data_from_numpy(values, binary_data=True)
    b.set_data_from_numpy(values, binary_data=False)
    wanted = [
        triton.InferRequestedOutput("total", binary_data=True),
        triton.InferRequestedOutput("rows", binary_data=False),
    ]
    answer = client.infer(SUM, [b, a], outputs=wanted, headers=auth())
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["total", "rows"]
    np.testing.assert_array_equal(answer.as_numpy("total"), values * 2)
    assert answer.as_numpy("rows").tolist() == [2]
    everything = client.infer(SUM, [a, b], headers=auth())  # all outputs, in the model's order, binary
    assert [output["name"] for output in everything.get_response()["outputs"]] == ["rows", "total"]


def test_ranks_and_empty_tensors(http: httpx.Client) -> None:
    cube = {"name": "cube", "datatype": "INT8", "shape": [2, 1, 2], "data": [[[1, 2]], [[3, 4]]]}
    scalar = {"name": "scalar", "datatype": "INT8", "shape": [], "data": [7]}
    answer = http.post(f"/v2/models/{RANKS}/infer", json={"inputs": [cube, scalar]}).json()
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert (outputs["cube"]["data"], outputs["scalar"]["data"], outputs["scalar"]["shape"]) == ([1, 2, 3, 4], [7], [])
    empty = {"name": "x", "datatype": "FP32", "shape": [0, 4], "data": []}
    answer = http.post(f"/v2/models/{identity('FP32')}/infer", json={"inputs": [empty]}).json()
    assert (answer["outputs"][0]["shape"], answer["outputs"][0]["data"]) == ([0, 4], [])


@given(tensor=tensors(("FP16", "BF16", "FP32", "FP64", "BYTES", "BOOL", "INT64")))
@settings(max_examples=20)
def test_binary_data_comes_back_bit_by_bit_but_for_bytes_that_are_no_text(
    client: triton.InferenceServerClient, bridge: RunningBridge, tensor: Any
) -> None:
    if len(tensor.shape) != 2:
        return
    described = {
        "name": "x",
        "datatype": tensor.datatype,
        "shape": tensor.shape,
        "parameters": {"binary_data_size": len(tensor.data)},
    }
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    answer = httpx.post(
        f"{bridge.url}/v2/models/{identity(tensor.datatype)}/infer",
        content=head + tensor.data,
        headers={**auth(), LENGTH_HEADER: str(len(head))},
    )
    if refused := not_text(tensor):
        assert (answer.status_code, answer.json()) == (400, {"error": refused})
        return
    assert answer.status_code == 200, answer.text
    assert answer.content[int(answer.headers[LENGTH_HEADER]) :] == tensor.data


def test_what_is_served(client: triton.InferenceServerClient, http: httpx.Client, bridge: RunningBridge) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    with ready_workers(bridge, SUM, MODEL):
        check_ready(client, http)
    assert not client.is_model_ready("nobody", headers=auth())
    metadata = client.get_model_metadata(SUM, headers=auth())
    assert metadata["platform"] == "onnx_onnxv1"
    assert metadata["inputs"][0] == {"name": "a", "datatype": "FP32", "shape": [-1, 3]}
    assert metadata["versions"] == ["v1"]
    assert "binary_tensor_data" in client.get_server_metadata(headers=auth())["extensions"]
    assert client.get_model_metadata(MODEL, headers=auth())["inputs"][0]["name"] == "text_input"
    for path in ("/v2", f"/v2/models/{SUM}"):
        assert http.get(path).status_code == 200
    for path in ("/v2", f"/v2/models/{SUM}", f"/v2/models/{SUM}/ready"):
        assert httpx.get(f"{bridge.url}{path}").status_code == 401


def check_ready(client: triton.InferenceServerClient, http: httpx.Client) -> None:
    assert client.is_model_ready(SUM, headers=auth())
    assert client.is_model_ready(SUM, "v1", headers=auth())
    assert not client.is_model_ready(SUM, "v2", headers=auth())
    assert http.get(f"/v2/models/{SUM}/ready").json() == {"name": SUM, "ready": True}
    index = {item["name"]: item["state"] for item in client.get_model_repository_index(headers=auth())}
    assert index[SUM] == index[MODEL] == "READY"


def test_the_models_error_comes_with_its_text_at_once(client: triton.InferenceServerClient) -> None:
    x = triton.InferInput("x", [1, 5], "FP32")
    x.set_data_from_numpy(np.ones((1, 5), np.float32))
    with pytest.raises(InferenceServerException, match="3 times 4 is not 5") as caught:
        client.infer(FAILS, [x], headers=auth())
    assert caught.value.status() == "500"
    assert caught.value.message() == FAULT


@pytest.mark.parametrize("how", ["parameter", "header"])
def test_a_deadline_in_microseconds_travels(http: httpx.Client, bridge: RunningBridge, how: str) -> None:
    asked = body(parameters={"timeout": 999_001}) if how == "parameter" else body(parameters={"timeout": 90_000_000})
    headers = {"X-Headrace-Timeout-Ms": "1000"}
    answer = http.post(f"/v2/models/{FAILS}/infer", json=asked, headers=headers)
    assert bridge.responder.seen[answer.headers["x-request-id"]].event.timeout_ms == 1_000


@pytest.mark.parametrize("wish", [{"tier": "batch"}, {"priority": 2}])
def test_a_tier_by_name_or_priority_where_the_key_allows_it(
    http: httpx.Client, bridge: RunningBridge, wish: dict[str, Any]
) -> None:
    answer = http.post(f"/v2/models/{FAILS}/infer", json=body(parameters=wish))
    assert bridge.responder.seen[answer.headers["x-request-id"]].topic == requests_topic(BATCH)
    answer = http.post(f"/v2/models/{FAILS}/infer", json=body(parameters={"priority": 1}))
    assert bridge.responder.seen[answer.headers["x-request-id"]].topic == requests_topic(INTERACTIVE)
    other = {"Authorization": f"Bearer {BATCH_ONLY}"}
    assert http.post(f"/v2/models/{FAILS}/infer", json=body(), headers=other).status_code == 403


@pytest.mark.parametrize("how", ["parameter", "header"])
def test_a_repeat_under_a_key_is_answered_by_the_first(http: httpx.Client, how: str) -> None:
    key = f"rest-{how}-{time.time_ns()}"
    x = {"name": "x", "datatype": "INT8", "shape": [1, 1], "data": [5]}
    asked = body(x, parameters={"idempotency_key": key}) if how == "parameter" else body(x)
    headers = {} if how == "parameter" else {"Idempotency-Key": key}
    first, second = (http.post(f"/v2/models/{identity('INT8')}/infer", json=asked, headers=headers) for _ in range(2))
    assert first.json()["outputs"] == second.json()["outputs"]
    assert second.headers["idempotent-replayed"] == "true"
    changed = body({**x, "data": [6]}, parameters={"idempotency_key": key})
    assert http.post(f"/v2/models/{identity('INT8')}/infer", json=changed).status_code == 409


def test_processors_parameters_and_output_that_is_no_text(http: httpx.Client) -> None:
    files = {
        "name": "bytes",
        "datatype": "BYTES",
        "shape": [2],
        "data": ["AAAA/w==", "YQ=="],
        "parameters": {"content_type": "base64"},
    }
    answer = http.post(f"/v2/models/{FILES}/infer", json=body(files)).json()
    label, score = answer["outputs"]
    assert (label["shape"], label["parameters"]) == ([2, 2], {"content_type": "base64"})
    assert (label["data"][0], score["data"]) == ("bG9uZw==", [0.75, 0.25, 0.75, 0.25])
    answer = http.post(f"/v2/models/{FILES}/infer", json=body(files, parameters={"top_k": 1})).json()
    assert answer["outputs"][0]["data"] == ["long", "short"]
    asked = body(files, parameters={"top_k": 1}, outputs=[{"name": "label", "parameters": {"content_type": "base64"}}])
    assert http.post(f"/v2/models/{FILES}/infer", json=asked).json()["outputs"][0]["data"] == ["bG9uZw==", "c2hvcnQ="]
    assert http.post(f"/v2/models/{FILES}/infer", json=body(files, parameters={"top_k": 0})).status_code == 400


def test_bf16_is_refused_in_json_before_the_model_runs(http: httpx.Client, bridge: RunningBridge) -> None:
    described = {"name": "x", "datatype": "BF16", "shape": [1, 1], "parameters": {"binary_data_size": 2}}
    head = json.dumps({"inputs": [described]}).encode()
    before = len(bridge.responder.seen)
    answer = http.post(
        f"/v2/models/{identity('BF16')}/infer", content=head + b"\0\0", headers={LENGTH_HEADER: str(len(head))}
    )
    written = http.post(
        f"/v2/models/{identity('BF16')}/infer",
        json={"inputs": [{"name": "x", "datatype": "BF16", "shape": [1, 1], "data": [0.5]}]},
    )
    assert (answer.status_code, written.status_code, len(bridge.responder.seen)) == (400, 400, before)
    assert "ask for it as binary data" in answer.json()["error"]
    assert "send it as binary data" in written.json()["error"]


async def test_who_leaves_cancels(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        before = set(bridge.responder.seen)
        call = asyncio.create_task(client.post(f"/v2/models/{HANGS}/infer", json=body()))
        new: list[str] = []

        def asked() -> bool:
            new[:] = [
                key
                for key, seen in list(bridge.responder.seen.items())
                if key not in before and seen.event.model == HANGS
            ]
            return bool(new)

        await bridge.until(asked)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await bridge.until(lambda: new[0] in bridge.responder.cancelled)


async def test_a_deadline_is_answered_with_504(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        answer = await client.post(f"/v2/models/{HANGS}/infer", json=body(parameters={"timeout": 250_000}))
    assert (answer.status_code, list(answer.json())) == (504, ["error"])


@pytest.mark.parametrize("large", [300_000, 1_200_000])
def test_large_tensors_come_back_whole(http: httpx.Client, large: int) -> None:
    values = np.random.default_rng(1).integers(0, 255, large, dtype=np.uint8)
    described = {"name": "x", "datatype": "UINT8", "shape": [1, large], "parameters": {"binary_data_size": large}}
    head = json.dumps({"inputs": [described]}).encode()
    answer = http.post(
        f"/v2/models/{identity('UINT8')}/infer",
        content=head + values.tobytes(),
        headers={LENGTH_HEADER: str(len(head))},
    )
    assert answer.json()["outputs"][0]["data"] == values.tolist()


# --- language models --------------------------------------------------------------------------------------------------


def test_text_through_infer(client: triton.InferenceServerClient, bridge: RunningBridge) -> None:
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array(["hi"], dtype=object))
    sampling = triton.InferInput("sampling_parameters", [1], "BYTES")
    sampling.set_data_from_numpy(np.array([json.dumps({"temperature": "0.5", "stop": ["a"]})], dtype=object))
    answer = client.infer(MODEL, [text, sampling], headers=auth(), parameters={"max_tokens": 9})
    assert answer.as_numpy("text_output").tolist() == [b"hihi"]  # as Triton's vLLM backend: the prompt first
    assert answer.as_numpy("finish_reason").tolist() == [b"stop"]
    assert answer.get_response()["parameters"]["completion_tokens"] == 2
    event = max(bridge.responder.seen.values(), key=lambda seen: seen.event.request_id).event
    assert (event.prompt, event.sampling.max_tokens, event.sampling.temperature, event.sampling.stop) == (
        "hi",
        9,
        0.5,
        ("a",),
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 9},
        {"nonsense": 1},
        {"stream": True},
        {"model": "x"},
        {"stream": True, "exclude_input_in_output": False},
        {"sampling_parameters": "[1]"},
    ],
)
def test_bad_parameters_of_text(http: httpx.Client, bad: dict[str, Any]) -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    answer = http.post(f"/v2/models/{MODEL}/infer", json=body(text, parameters=bad))
    assert answer.status_code == 400, answer.text


async def test_large_tensors_are_looked_through_once_and_beside_the_loop(
    bridge: RunningBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[str] = []

    def noted(*given: Any) -> Any:
        where.append(threading.current_thread().name)
        return input_problem(*given)

    for module in (serving, validation):
        monkeypatch.setattr(module, "input_problem", noted)
    data = base64.b64encode(bytes(300_000)).decode()
    x = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": [data]}
    async with bridge.client() as client:
        answer = await client.post(f"/v2/models/{identity('BYTES')}/infer", json={"inputs": [x]})
    assert answer.json()["outputs"][0]["data"] == [data]
    (thread,) = where
    assert thread != "bridge"
