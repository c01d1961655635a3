"""What is wrong in a body of the protocol over REST is refused by its field, and nothing of it reaches the log."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bridge.inference.rest_requests import LENGTH_HEADER
from tests.bridge.conftest import RunningBridge
from tests.bridge.inference_calls import FIVE, body
from tests.bridge.tensors import ADD, HANGS, identity

BAD_BODIES: list[tuple[str, Any]] = [
    ("7 values for a shape of 5", body({**FIVE, "data": [1, 2, 3, 4, 5, 6, 7]})),
    ("another datatype", body({**FIVE, "datatype": "INT32"})),
    ("an unknown datatype", body({**FIVE, "datatype": "FP8"})),
    ("another shape", body({**FIVE, "shape": [5], "data": [1, 2, 3, 4, 5]})),
    ("a negative shape", body({**FIVE, "shape": [-1, -5]})),
    ("a huge shape", body({**FIVE, "shape": [1 << 39, 1 << 39, 1 << 39]})),
    ("a shape of text", body({**FIVE, "shape": "1,5"})),
    ("another name", body({**FIVE, "name": "z"})),
    ("a name twice", body(FIVE, FIVE)),
    ("an input that is none", body(FIVE, 3)),
    ("no inputs", {"inputs": []}),
    ("inputs of null", {"inputs": None}),
    ("no body", b""),
    ("a list", b"[]"),
    ("half a body", b'{"inputs": [{"name": "x"'),
    ("an unknown output", body(outputs=[{"name": "nothing"}])),
    ("an unknown parameter", body(parameters={"temperature": 0.5})),
    ("an unknown field", body(input=[])),
    ("an id that is none", body(id=7)),
    ("nested parameters", body(parameters={"timeout": {"us": 1}})),
    ("a negative timeout", body(parameters={"timeout": -1})),
    ("a timeout of text", body(parameters={"timeout": "soon"})),
    ("an unknown tier", body(parameters={"tier": "shadow"})),
    ("a priority that contradicts", body(parameters={"tier": "batch", "priority": 1})),
    ("a key of a line", body(parameters={"idempotency_key": "a\nb"})),
    ("shared memory", body({**FIVE, "parameters": {"shared_memory_region": "r"}})),
    ("binary data without the header", body({"name": "x", "datatype": "FP32", "shape": [1, 5], "parameters": {"binary_data_size": 20}})),
    ("classification", body(outputs=[{"name": "y", "parameters": {"classification": 2}}])),
    ("another model", body(model_name="other")),
    ("a surrogate in a name", b'{"inputs": [{"name": "\\ud800", "datatype": "FP32", "shape": [1], "data": [1]}]}'),
]  # fmt: skip


@pytest.mark.parametrize("bad", [bad for _, bad in BAD_BODIES], ids=[name for name, _ in BAD_BODIES])
def test_a_bad_body_is_400_with_the_protocols_error_and_reaches_nobody(
    http: httpx.Client, bridge: RunningBridge, bad: Any
) -> None:
    before = set(bridge.responder.seen)
    raw = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    answer = http.post(f"/v2/models/{HANGS}/infer", content=raw)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    assert not any(seen.event.model == HANGS for key, seen in bridge.responder.seen.items() if key not in before)


@pytest.mark.parametrize(
    ("length", "size"),
    [("x", 20), ("-1", 20), ("99999", 20), (None, 19), (None, 21), (None, -1), (None, "20"), (None, 2**70)],
)
def test_sizes_that_disagree_are_400(http: httpx.Client, length: str | None, size: Any) -> None:
    described = {"name": "x", "datatype": "FP32", "shape": [1, 5], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [described]}).encode()
    headers = {LENGTH_HEADER: length or str(len(head))}
    assert http.post(f"/v2/models/{HANGS}/infer", content=head + bytes(20), headers=headers).status_code == 400


@pytest.mark.parametrize("text", ["\\ud800", "a\\udc00b"])
def test_an_unpaired_surrogate_never_reaches_the_log(http: httpx.Client, bridge: RunningBridge, text: str) -> None:
    model = identity("BYTES")
    raw = f'{{"inputs": [{{"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["{text}"]}}], "id": "NaN"}}'
    before = len(bridge.responder.seen)
    answer = http.post(f"/v2/models/{model}/infer", content=raw.encode())
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]
    assert len(bridge.responder.seen) == before


def test_rows_that_disagree_are_refused_before_the_log(http: httpx.Client, bridge: RunningBridge) -> None:
    def rows(name: str, count: int) -> dict[str, Any]:
        return {"name": name, "datatype": "FP32", "shape": [count, 3], "data": [1.0] * 3 * count}

    before = len(bridge.responder.seen)
    answer = http.post(f"/v2/models/{ADD}/infer", json={"inputs": [rows("a", 2), rows("b", 3)]})
    assert answer.status_code == 400
    assert "differ in their number of rows, from 2 to 3: `a` 2, `b` 3" in answer.json()["error"]
    assert len(bridge.responder.seen) == before
    assert http.post(f"/v2/models/{ADD}/infer", json={"inputs": [rows("a", 2), rows("b", 2)]}).status_code == 200


def test_errors_have_the_status_of_their_reason(http: httpx.Client, bridge: RunningBridge) -> None:
    assert http.post("/v2/models/nobody/infer", json=body()).status_code == 404
    assert http.post(f"/v2/models/{HANGS}/versions/v9/infer", json=body()).status_code == 404
    assert http.get("/v2/nothing").json()["error"]
    refused = http.put(f"/v2/models/{HANGS}/infer")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert httpx.post(f"{bridge.url}/v2/models/{HANGS}/infer", json=body()).status_code == 401
    large = http.post(f"/v2/models/{HANGS}/infer", content=bytes(bridge.settings.body_bytes_max + 1))
    assert (large.status_code, list(large.json())) == (413, ["error"])
