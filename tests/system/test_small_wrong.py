"""Tensors that a small model doesn't take, at the front door and by direct producers, beside those that it takes: none is work."""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from cli.registry import now_ms
from decisions.batching import MAX_BATCH_SIZE, PARTS_MAX
from infra.models_file import ModelEntry
from schemas.codec import encode, encode_json
from schemas.events import (
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    Tensor,
)
from schemas.ids import request_id
from schemas.tensors import pack, unpack
from schemas.topics import GRANT_HEADER, INTERACTIVE, requests_topic
from tests import onnx_models
from tests.system.audit import Mark
from tests.system.fixtures_small import PAIRING, PICKING, SmallModels, served
from tests.system.running import RunningStack
from tests.system.small_door import message, tensor
from tests.system.test_junk import send

FIVE = [10.0, 20.0, 30.0, 20.0, 10.0]
NO_TEXT = b"\xff"
WRONG_PAIRS = ((1, 2, [b"a"]), (1, 1, [b"a", b"b"]), (0, 1, [b"a"]), (1, 1, [NO_TEXT]))
"""Rows of `a` and of `b`, and the words."""
TOO_MANY = PARTS_MAX * MAX_BATCH_SIZE + 1
"""Rows, which need have no elements."""


@pytest.fixture(scope="module")
def made(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallModels]:
    """`picking` has one input, `pairing` three whose rows belong together."""
    folder = tmp_path_factory.mktemp("made")
    picking, pairing = onnx_models.picking(folder / PICKING), onnx_models.pairing(folder / PAIRING)
    late = {"max_queue_delay_ms": 20}
    with served(
        stack,
        ModelEntry(PICKING, "1", "onnx", str(picking), 512, slots=32, engine_args=late),
        ModelEntry(PAIRING, "1", "onnx", str(pairing), 512, slots=32, engine_args=late),
    ) as found:
        yield found


def pair(a: int, b: int, words: list[bytes]) -> tuple[Tensor, ...]:
    """The inputs of `pairing`, of these numbers of rows: in each row of `a` are `FIVE`, in those of `b` zeros."""
    return (
        Tensor("a", "FP32", (a, 5), struct.pack("<5f", *FIVE) * a),
        Tensor("b", "FP32", (b, 5), bytes(20) * b),
        Tensor("word", "BYTES", (len(words),), pack(words)),
    )


def described(given: Tensor, **more: Any) -> dict[str, Any]:
    return {"name": given.name, "datatype": given.datatype, "shape": given.shape, **more}


def as_json(given: tuple[Tensor, ...]) -> dict[str, Any]:
    """A call's arguments for httpx."""
    *numbers, words = given
    inputs = [described(each, data=np.frombuffer(each.data, "<f4").tolist()) for each in numbers]
    said = [base64.b64encode(each).decode() for each in unpack(words.data)]
    return {"json": {"inputs": [*inputs, described(words, data=said, parameters={"content_type": "base64"})]}}


def as_binary(given: tuple[Tensor, ...]) -> dict[str, Any]:
    """A call's arguments for httpx."""
    inputs = [described(each, parameters={"binary_data_size": len(each.data)}) for each in given]
    head = json.dumps({"inputs": inputs}).encode()
    data = b"".join(each.data for each in given)
    return {"content": head + data, "headers": {"Inference-Header-Content-Length": str(len(head))}}


def as_message(given: tuple[Tensor, ...]) -> Any:
    found = service_pb2.ModelInferRequest(model_name=PAIRING)
    for each in given:
        found.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        found.raw_input_contents.append(each.data)
    return found


def test_a_wrong_tensor_is_refused_beside_a_right_one_and_reaches_no_topic(
    stack: RunningStack, made: SmallModels, http: httpx.Client, infer: Callable[[Any], Any]
) -> None:
    """triton#7171, PR#3158: 7 values for a shape of [1, 5] in the window in which others send 5; and all else that a shape can be wrong in,
    rows that disagree or are too many, and bytes that are no text.
    """
    path, right = f"/v2/models/{PICKING}/infer", [0, 1, 2, 1, 0]
    seven = [*right, 2, 2]

    def rest(*given: dict[str, Any]) -> Callable[[], httpx.Response]:
        return lambda: http.post(path, json={"inputs": list(given)})

    def paired(a: int, b: int, words: list[bytes]) -> list[Callable[[], Any]]:
        """Tensors of these numbers of rows: as JSON, as binary data, and by gRPC."""
        given = pair(a, b, words)
        return [
            lambda: http.post(f"/v2/models/{PAIRING}/infer", **as_json(given)),
            lambda: http.post(f"/v2/models/{PAIRING}/infer", **as_binary(given)),
            lambda: infer(as_message(given)),
        ]

    def binary(shape: list[int], values: list[int]) -> Callable[[], httpx.Response]:
        x = Tensor("x", "INT64", tuple(shape), struct.pack(f"<{len(values)}q", *values))
        return lambda: http.post(path, **as_binary((x,)))

    good = [
        rest(tensor("x", "INT64", [1, 5], right)),
        binary([1, 5], right),
        *((lambda raw=raw: infer(message([1, 5], right, raw=raw))) for raw in (True, False)),
        *paired(1, 1, ["ä".encode()]),
    ]
    bad = [
        *(rest(tensor("x", "INT64", [1, 5], values)) for values in (seven, [*right, 2], right[:4], [], [right, right])),
        *(rest(tensor("x", "INT64", shape, right)) for shape in ([5], [], [1, 5, 1], [5, 5], [-1, -5], [0, 5])),
        rest(tensor("x", "INT64", [TOO_MANY, 0], [])),
        lambda: infer(message([TOO_MANY, 0], [], raw=False)),
        rest(tensor("x", "INT32", [1, 5], right)),
        rest(tensor("y", "INT64", [1, 5], right)),
        rest(tensor("x", "INT64", [1, 5], right), tensor("x", "INT64", [1, 5], right)),
        *(binary(shape, values) for shape, values in (([1, 5], seven), ([1, 5], right[:4]), ([1, 7], right))),
        *(
            (lambda raw=raw, values=values: infer(message([1, 5], values, raw=raw)))
            for raw in (True, False)
            for values in (seven, right[:4])
        ),
        *(call for wrong in WRONG_PAIRS for call in paired(*wrong)),
    ]
    asked = [call for beside in zip(itertools.cycle(good), bad, strict=False) for call in beside]
    mark = Mark(stack, "requests.")
    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(lambda call: call(), asked))
    for answer in found[::2]:
        if isinstance(answer, httpx.Response):
            assert answer.json()["outputs"][0]["data"] == FIVE, answer.text
        else:
            (first, *_) = answer.raw_output_contents or [np.array(answer.outputs[0].contents.fp32_contents, "<f4")]
            assert np.frombuffer(first, "<f4").tolist() == FIVE
    for answer in found[1::2]:
        if isinstance(answer, httpx.Response):
            assert (answer.status_code, list(answer.json())) == (400, ["error"]), answer.text
            assert "x-request-id" not in answer.headers
        else:
            assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT
    events = [item.event for item in mark.records() if isinstance(item.event, InferenceRequested)]
    assert sum(event.model in (PICKING, PAIRING) for event in events) == len(bad), "those that are right, and no other"


RIGHT = pair(1, 1, ["ä".encode()])
A, B, WORD = RIGHT
WRONG: dict[str, tuple[tuple[Tensor, ...], str, str]] = {
    "another name": ((A, B, replace(WORD, name="c")), "signature", "no input `c`"),
    "one too few": ((A, B), "signature", "the input `word` is missing"),
    "another datatype": ((replace(A, datatype="INT32"), B, WORD), "signature", "takes FP32, not INT32"),
    "another shape": ((replace(A, shape=(5, 1)), B, WORD), "signature", "takes the shape [-1, 5], not [5, 1]"),
    "too few elements": ((replace(A, data=A.data[:16]), B, WORD), "validation", "takes 5 elements of FP32 (20 bytes)"),
    "rows that disagree": (pair(1, 2, [b"a"]), "signature", "from 1 to 2: `a` 1, `b` 2, `word` 1"),
    "no text": (pair(1, 1, [NO_TEXT]), "signature", "`word`: element 0 isn't UTF-8 text"),
}
"""By what is wrong: the inputs, the check that refuses them, and its words."""


@pytest.mark.parametrize("written", [encode, encode_json], ids=["avro", "json"])
def test_a_direct_producers_wrong_tensors_are_refused_beside_right_ones_and_are_no_work(
    stack: RunningStack, made: SmallModels, written: Callable[[InferenceRequested], bytes]
) -> None:
    told = stack.command("tenants", "grant", "acme", "--tiers", INTERACTIVE, "--json").stdout
    headers = [(GRANT_HEADER, json.loads(told)["grant"].encode())]
    names = [request_id(now_ms(), os.urandom(10)) for _ in range(2 * len(WRONG))]
    given = [inputs for wrong, _, _ in WRONG.values() for inputs in (wrong, RIGHT)]
    asked = [InferenceRequested(name, PAIRING, inputs=inputs) for name, inputs in zip(names, given, strict=True)]
    mark = Mark(stack, f"work.{PAIRING}.", "lifecycle", "tokens")
    topic = requests_topic(INTERACTIVE)
    stack.thread.run(send(stack.kafka, [(topic, None, b"acme", written(each)) for each in asked], headers))
    found = stack.until(lambda: endings(mark, names))
    for (what, (_, check, words)), name in zip(WRONG.items(), names[::2], strict=True):
        rejected = found[name]
        assert isinstance(rejected, InferenceRejected), what
        assert (what, rejected.reason, rejected.decisions[-1].check) == (what, "invalid_request", check)
        assert words in rejected.message
    for name in names[1::2]:
        assert isinstance(found[name], InferenceCompleted)
    records = mark.records()
    work = {item.event.request_id for item in records if isinstance(item.event, InferenceScheduled)}
    assert work == set(names[1::2]), "those that are right, and no other"
    for item in records:
        if (
            isinstance(item.event, InferenceCompleted)
            and item.topic.startswith("tokens")
            and item.event.request_id in work
        ):
            assert np.frombuffer(item.event.outputs[0].data, "<f4").tolist() == FIVE


def endings(mark: Mark, names: list[str]) -> dict[str, Any] | None:
    """By request, its ending on `lifecycle`; None until each has one."""
    found = {
        item.event.request_id: item.event
        for item in mark.records()
        if item.topic == "lifecycle"
        and isinstance(item.event, InferenceCompleted | InferenceRejected | InferenceFailed)
    }
    return {name: found[name] for name in names} if found.keys() >= set(names) else None
