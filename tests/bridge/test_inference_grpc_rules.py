"""The rules of every request over gRPC, unary and on a stream: repeats, deadlines, tiers, and what becomes of a refusal or failure."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from bridge.inference.messages import SERVICE
from schemas.reasons import Reason
from schemas.topics import BATCH, INTERACTIVE, requests_topic
from tests.bridge.conftest import BATCH_ONLY, KEY, MODEL, RunningBridge
from tests.bridge.inference_calls import address, five, request
from tests.bridge.responder import Seen
from tests.bridge.tensors import FAILS, HANGS, identity
from tests.bridge.test_limits import HEADERS, TOLD

WAIT_S = 30
IDENTITY = identity("INT8")
_numbers = itertools.count()


@dataclass
class Heard:
    """What a call came to, however it was made. `text` is an error's, and `told` what came beside the answer."""

    outputs: list[Any]
    told: dict[str, Any]
    reason: str = ""
    text: str = ""
    code: grpc.StatusCode | None = None


Call = Callable[..., Heard]


def metadata_of(call: Any) -> dict[str, Any]:
    """The trailing metadata."""
    return {each.key: each.value for each in call.trailing_metadata() or ()}


def sent_by(key: str, metadata: dict[str, str]) -> list[tuple[str, str]]:
    """What a call sends beside its request."""
    return [("authorization", f"Bearer {key}"), *((name.replace("_", "-"), value) for name, value in metadata.items())]


def unary(channel: grpc.Channel, asked: Any, key: str = KEY, **metadata: str) -> Heard:
    call: Any = channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        service_pb2.ModelInferRequest.SerializeToString,
        service_pb2.ModelInferResponse.FromString,
    )
    try:
        answer, made = call.with_call(asked, metadata=sent_by(key, metadata), timeout=WAIT_S)
    except grpc.RpcError as error:
        told = metadata_of(error)
        return Heard([], told, told.get("headrace-reason", ""), error.details() or "", error.code())
    return Heard(contents(answer), metadata_of(made), code=made.code())


def streamed(channel: grpc.Channel, asked: Any, key: str = KEY, **metadata: str) -> Heard:
    """Its one request's messages up to the last. A failure's status is that of its reason; the stream itself has ended well."""
    call: Any = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        service_pb2.ModelInferRequest.SerializeToString,
        service_pb2.ModelStreamInferResponse.FromString,
    )
    outputs: list[Any] = []
    try:
        last = None
        for last in call(iter([asked]), metadata=sent_by(key, metadata), timeout=WAIT_S):
            outputs += contents(last.infer_response)
        assert last is not None
    except grpc.RpcError as error:
        return Heard([], {}, metadata_of(error).get("headrace-reason", ""), code=error.code())
    assert last.infer_response.id == asked.id
    told = {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in last.infer_response.parameters.items()}  # fmt: skip
    if "request_id" in told:
        told["x-request-id"] = told["request_id"]
    if told.get("replayed"):
        told["idempotent-replayed"] = "true"
    reason = told.get("headrace-reason", "")
    code = grpc.StatusCode[Reason(reason).grpc_code] if reason else grpc.StatusCode.OK
    assert bool(reason) == bool(last.error_message)
    return Heard(outputs, told, reason, last.error_message, code)


def contents(answer: Any) -> list[Any]:
    return [list(output.contents.int_contents or output.contents.bytes_contents) for output in answer.outputs]


@pytest.fixture(scope="module", params=[unary, streamed])
def call(bridge: RunningBridge, request: pytest.FixtureRequest) -> Iterator[Call]:
    """`ModelInfer`, and a `ModelStreamInfer` of one request."""
    with grpc.insecure_channel(address(bridge)) as channel:
        yield lambda *given, **more: request.param(channel, *given, **more)


def number(value: int) -> Any:
    return request(IDENTITY, x=("INT8", [1, 1], {"int_contents": [value]}))


def script(**directions: Any) -> Any:
    """A request to the language model, whose answer streams where it may."""
    return request(MODEL, text_input=("BYTES", [1], {"bytes_contents": [json.dumps(directions).encode()]}))


def under(asked: Any, key: str) -> Any:
    asked.parameters["idempotency_key"].string_param = key
    return asked


def new_key() -> str:
    return f"grpc rules {time.time_ns()} {next(_numbers)}"


def of_key(bridge: RunningBridge, key: str) -> list[Seen]:
    return [seen for seen in list(bridge.responder.seen.values()) if seen.event.idempotency_key == key]


# --- repeats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["parameter", "metadata"])
def test_a_repeat_is_answered_by_the_first_and_says_so(call: Call, how: str) -> None:
    key = new_key()
    metadata = {} if how == "parameter" else {"idempotency_key": key}

    def ask(value: int) -> Heard:
        return call(number(value) if metadata else under(number(value), key), **metadata)

    first, again = ask(5), ask(5)
    assert first.outputs == again.outputs == [[5]]
    assert first.told["x-request-id"] == again.told["x-request-id"]
    assert ("idempotent-replayed" in first.told, again.told["idempotent-replayed"]) == (False, "true")
    other = ask(6)
    assert (other.code, other.reason) == (grpc.StatusCode.ALREADY_EXISTS, "conflict")
    assert "unchanged" in other.text
    assert ask(5).outputs == [[5]], "what was refused left the key as it is"


def test_the_tokens_of_a_repeat_are_the_firsts(call: Call) -> None:
    key = new_key()
    asked = under(script(tokens=["a", "b", "c"], gap_ms=20), key)
    first, again = call(asked), call(asked)
    assert first.outputs[0] == again.outputs[0]
    assert first.told["x-request-id"] == again.told["x-request-id"]
    assert again.told["idempotent-replayed"] == "true"


async def test_rest_and_grpc_share_a_key(call: Call, bridge: RunningBridge) -> None:
    key = new_key()
    first = call(under(number(7), key))
    x = {"name": "x", "datatype": "INT8", "shape": [1, 1], "data": [7]}
    async with bridge.client() as client:
        again = await client.post(
            f"/v2/models/{IDENTITY}/infer", json={"inputs": [x]}, headers={"Idempotency-Key": key}
        )
    assert again.headers["x-request-id"] == first.told["x-request-id"]
    assert again.headers["idempotent-replayed"] == "true"


# --- deadlines and tiers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["parameter", "metadata"])
@pytest.mark.parametrize("model", [HANGS, MODEL])
def test_a_deadline_has_its_own_status(call: Call, model: str, how: str) -> None:
    """`WAIT_S` is the call's own."""
    asked = five(HANGS) if model == HANGS else script(unadmitted=True)
    if how == "parameter":
        asked.parameters["timeout"].int64_param = 300_000
    heard = call(asked, **({} if how == "parameter" else {"x_headrace_timeout_ms": "300"}))
    assert (heard.code, heard.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
    assert heard.told["x-request-id"]


@pytest.mark.parametrize(
    ("name", "value", "tier"),
    [("tier", BATCH, BATCH), ("tier", INTERACTIVE, INTERACTIVE), ("priority", 2, BATCH), ("priority", 1, INTERACTIVE)],
)
def test_a_tier_is_the_topic_of_the_request(
    call: Call, bridge: RunningBridge, name: str, value: str | int, tier: str
) -> None:
    key = new_key()
    asked = under(number(3), key)
    setattr(asked.parameters[name], "string_param" if name == "tier" else "int64_param", value)
    assert call(asked).outputs == [[3]]
    assert [seen.topic for seen in of_key(bridge, key)] == [requests_topic(tier)]


# --- what becomes of a refusal or a failure ---------------------------------------------------------------------------

CODES = {
    "invalid_request": (400, grpc.StatusCode.INVALID_ARGUMENT),
    "context_length_exceeded": (400, grpc.StatusCode.INVALID_ARGUMENT),
    "invalid_grant": (401, grpc.StatusCode.UNAUTHENTICATED),
    "permission_denied": (403, grpc.StatusCode.PERMISSION_DENIED),
    "model_not_found": (404, grpc.StatusCode.NOT_FOUND),
    "conflict": (409, grpc.StatusCode.ALREADY_EXISTS),
    "rate_limited": (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "overloaded": (503, grpc.StatusCode.UNAVAILABLE),
    "no_worker": (503, grpc.StatusCode.UNAVAILABLE),
    "deadline_exceeded": (504, grpc.StatusCode.DEADLINE_EXCEEDED),
    "time_limit_exceeded": (504, grpc.StatusCode.DEADLINE_EXCEEDED),
    "worker_lost": (503, grpc.StatusCode.UNAVAILABLE),
    "poisoned": (500, grpc.StatusCode.INTERNAL),
    "payload_lost": (500, grpc.StatusCode.DATA_LOSS),
    "internal_error": (500, grpc.StatusCode.INTERNAL),
}


@pytest.mark.parametrize("reason", CODES)
def test_a_refusal_has_the_code_of_its_reason(call: Call, reason: str) -> None:
    heard = call(script(reject=reason, retry_after_ms=1_500))
    assert (heard.code, heard.reason, heard.text) == (CODES[reason][1], reason, "no")
    assert int(heard.told["retry-after"]) == 2
    assert heard.told["x-request-id"]


@pytest.mark.parametrize("reason", CODES)
def test_a_failure_after_some_tokens_has_it_too(call: Call, reason: str) -> None:
    heard = call(script(tokens=["a", "b"], fail=reason, fail_after=1))
    assert (heard.code, heard.reason, heard.text) == (CODES[reason][1], reason, "broke")


def limits(heard: Heard) -> dict[str, Any]:
    return {name: value for name, value in heard.told.items() if name.startswith("x-ratelimit")}


def test_an_answer_a_refusal_and_a_failure_tell_what_is_left_of_limits(call: Call) -> None:
    refused = call(script(reject="rate_limited", retry_after_ms=7_660, rates=TOLD))
    assert (refused.code, int(refused.told["retry-after"])) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 8)
    failed = call(script(tokens=["a"], fail="engine_error", fail_after=0, rates=TOLD))
    assert failed.code is grpc.StatusCode.INTERNAL
    for heard in (refused, failed, call(script(tokens=["a", "b"], rates=TOLD))):
        assert limits(heard) == HEADERS
    for unlimited in (script(tokens=["a"]), script(reject="rate_limited")):
        assert not limits(call(unlimited))


def test_a_repeat_tells_nothing_of_limits_as_they_were(call: Call) -> None:
    asked = under(script(rates=TOLD), new_key())
    assert [limits(call(asked)) for _ in range(2)] == [HEADERS, {}]


@pytest.mark.parametrize("reason", CODES)
async def test_rest_has_the_status_of_the_same_reason(bridge: RunningBridge, reason: str) -> None:
    async with bridge.client() as client:

        async def ask(where: str, **directions: Any) -> httpx.Response:
            text = json.dumps(directions)
            if where == "generate":
                return await client.post(f"/v2/models/{MODEL}/generate", json={"text_input": text})
            prompt = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}
            return await client.post(f"/v2/models/{MODEL}/infer", json={"inputs": [prompt]})

        for where in ("infer", "generate"):
            refused = await ask(where, reject=reason, retry_after_ms=1_500)
            assert (refused.status_code, refused.json()) == (CODES[reason][0], {"error": "no"})
            assert refused.headers["retry-after"] == "2"
            assert refused.headers["x-request-id"]
            failed = await ask(where, tokens=["a", "b"], fail=reason, fail_after=1)
            assert (failed.status_code, failed.json()) == (CODES[reason][0], {"error": "broke"})


def test_what_is_refused_at_the_door(call: Call) -> None:
    assert call(five("nobody")).code is grpc.StatusCode.NOT_FOUND
    assert call(five(HANGS, 7)).code is grpc.StatusCode.INVALID_ARGUMENT
    assert call(five(HANGS), "hr-nobody").code is grpc.StatusCode.UNAUTHENTICATED
    assert call(five(HANGS), BATCH_ONLY).code is grpc.StatusCode.PERMISSION_DENIED
    assert call(five(FAILS)).code is grpc.StatusCode.INTERNAL
    late = five(HANGS)
    late.parameters["timeout"].int64_param = -1
    assert call(late).code is grpc.StatusCode.INVALID_ARGUMENT
