"""Requests that are right by the OpenAPI description and name a model that is served: each is answered, as the description says, and none hangs.

Their bodies are made from the description, and then made right where it can't say what is: which model is served, which ranges hold.
A call that isn't answered in `CALL_S` fails its test at once: nothing is made smaller, as each try would take as long again.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from bridge.openapi import document
from schemas.tensors import elements
from tests.bridge.conftest import KEY, MODEL, RunningBridge
from tests.bridge.tensors import ADD, FILES, RANKS, SUM, identity
from tests.bridge.test_inference_described import OPERATIONS

CALL_S = 15
EXAMPLES = 15
TIMEOUT_MS = 10_000
RUN = f"right {time.time_ns()}"
"""Begins the keys of this run: few, so that some are used again."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, CLASSIFICATIONS = "/v1/embeddings", "/v1/classifications"
EMBED, CLASSIFY, BYTES = "bridge-embed", "bridge-classify", "bridge-bytes"
DESCRIBED = json.loads(json.dumps(document()))
QUIET = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def optional(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of them, each with any of its values, or null, which takes the default."""
    return st.fixed_dictionaries({}, optional={name: st.none() | values for name, values in fields.items()})


# What schemathesis makes of these is mostly out of range: the description says what a field is, not how large it may be.
TEXT = st.text(max_size=12)
SAMPLING: dict[str, Any] = {
    "max_tokens": st.integers(1, 16),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "n": st.integers(1, 3),
    "stop": st.text("ab", min_size=1, max_size=3) | st.lists(st.text("ab", min_size=1, max_size=3), max_size=4),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-100, 100), max_size=3),
    "user": TEXT,
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 2),
    "min_tokens": st.just(0),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 99), max_size=3),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "timeout": st.floats(1, 60),
    "store": st.just(False),
    "metadata": st.just({}),
}
MESSAGE: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant"]),
        "content": TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3),
    },
    optional={"name": st.none() | st.text(min_size=1, max_size=8), "tool_calls": st.just([])},
)
STREAMED = st.fixed_dictionaries(
    {"stream": st.just(True)}, optional={"stream_options": st.fixed_dictionaries({"include_usage": st.booleans()})}
)
WHOLE = st.sampled_from([{}, {"stream": False}, {"stream": None}])
IDS = st.lists(st.integers(0, 200), min_size=1, max_size=8)
WORDS = st.text(min_size=1, max_size=12)
TEXTS = WORDS | st.lists(WORDS, min_size=1, max_size=5) | IDS | st.lists(IDS, min_size=1, max_size=3)
OCTETS = st.binary(max_size=9).map(lambda raw: {"base64": base64.b64encode(raw).decode()})
TOP_LOGPROBS = st.fixed_dictionaries({"logprobs": st.just(True)}, optional={"top_logprobs": st.integers(0, 3)})


def merged(*parts: Any) -> st.SearchStrategy[dict[str, Any]]:
    """One body of several parts."""
    return st.tuples(*parts).map(lambda found: {name: value for part in found for name, value in part.items()})


def of(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(fields)


RIGHT: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    CHAT: merged(
        optional(SAMPLING),
        of(model=st.just(MODEL), messages=st.lists(MESSAGE, min_size=1, max_size=3)),
        st.just({}) | TOP_LOGPROBS,
        WHOLE | STREAMED,
    ),
    COMPLETIONS: merged(
        optional({**SAMPLING, "logprobs": st.integers(0, 3)}),
        of(model=st.just(MODEL), prompt=TEXTS),
        WHOLE | STREAMED,
    ),
    EMBEDDINGS: merged(
        optional({"encoding_format": st.sampled_from(["float", "base64"]), "dimensions": st.integers(1, 4), "user": TEXT, "timeout": st.floats(1, 60)}),
        of(model=st.just(EMBED), input=TEXTS),
    ),
    CLASSIFICATIONS: merged(
        optional({"top_k": st.integers(1, 9), "user": TEXT, "timeout": st.floats(1, 60)}),
        of(model=st.just(CLASSIFY), input=TEXTS)
        | of(model=st.just(BYTES), input=OCTETS | st.lists(OCTETS | WORDS, min_size=1, max_size=4)),
    ),
}  # fmt: skip
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "X-Headrace-Timeout-Ms": st.integers(5_000, 86_400_000).map(str),
        "X-Headrace-On-Disconnect": st.sampled_from(["cancel", "continue"]),
        "Cache-Control": st.sampled_from(["no-cache", "no-store", "max-age=60"]),
        "Idempotency-Key": st.integers(0, 3).map(lambda number: f"{RUN} {number}"),
    },
)


@pytest.fixture(scope="module")
def http(bridge: RunningBridge) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bridge.url, headers=bridge.headers, timeout=CALL_S) as client:
        yield client


def component(name: str) -> jsonschema_rs.Validator:
    """Of the description's own schemas."""
    return jsonschema_rs.validator_for({**DESCRIBED, "$ref": f"#/components/schemas/{name}"})


def described(schema: dict[str, Any]) -> jsonschema_rs.Validator:
    """Of a schema that the description has somewhere."""
    return jsonschema_rs.validator_for({**schema, "components": DESCRIBED["components"]})


def events_of(path: str, method: str = "post") -> tuple[jsonschema_rs.Validator, jsonschema_rs.Validator]:
    """What the description says of a stream's events, and of the JSON that is their data."""
    content = DESCRIBED["paths"][path][method]["responses"]["200"]["content"]["text/event-stream"]
    told, done = content["schema"]["properties"]["data"]["anyOf"]
    assert (told["contentMediaType"], done["const"]) == ("application/json", "[DONE]")
    return described(content["schema"]), described(told["contentSchema"])


ANSWERS = {
    CHAT: (component("ChatAnswer"), events_of(CHAT)),
    COMPLETIONS: (component("CompletionAnswer"), events_of(COMPLETIONS)),
    EMBEDDINGS: (component("EmbeddingAnswer"), None),
    CLASSIFICATIONS: (component("ClassificationAnswer"), None),
}
ERROR = component("ErrorAnswer")
INFERENCE, GENERATED = component("InferenceAnswer"), component("GenerateAnswer")


def read_events(text: str, event: jsonschema_rs.Validator, data: jsonschema_rs.Validator) -> list[Any]:
    """The objects of a stream of events, of which the last says that it is done; each line is one that such a stream may have."""
    told: list[Any] = []
    found: dict[str, str] = {}
    assert "\r" not in text
    for line in text.split(
        "\n"
    ):  # not by `splitlines`, which would cut a text at characters that end no line of such a stream
        name, _, value = line.partition(": ")
        assert not line or name in {"", "id", "data"}, line
        if name:
            found[name] = value
        elif not line and found:
            event.validate(found)
            told.append(found["data"])
            found = {}
    assert told.pop() == "[DONE]"
    chunks = [json.loads(each) for each in told]
    for chunk in chunks:
        data.validate(chunk)
    return chunks


def check_answer(path: str, body: dict[str, Any], answer: httpx.Response) -> None:
    """A 200 as described: whole, or a chunk at a time."""
    whole, streamed = ANSWERS[path]
    assert answer.headers["x-request-id"]
    if not body.get("stream"):
        assert answer.headers["content-type"] == "application/json"
        whole.validate(answer.json())
        return
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert streamed is not None
    events = read_events(answer.text, *streamed)
    ends = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int) else [0]
    assert len(ends) == (body.get("n") or 1) * len(prompts)


@pytest.mark.parametrize("path", RIGHT)
def test_a_right_request_is_answered_as_described(http: httpx.Client, path: str) -> None:
    asked: dict[str, Any] = {}

    @QUIET
    @given(body=RIGHT[path], headers=HEADERS)
    def ask(body: dict[str, Any], headers: dict[str, str]) -> None:
        key = headers.get("Idempotency-Key", "")
        first = asked.setdefault(f"{path} {key}" if key else "", body)
        keyed = {**headers, "Idempotency-Key": f"{path} {key}"} if key else headers
        answer = http.post(path, content=json.dumps(body), headers=keyed)
        if key and json.dumps(first) != json.dumps(body) and answer.status_code == httpx.codes.CONFLICT:
            ERROR.validate(answer.json())
            return
        assert answer.status_code == httpx.codes.OK, answer.text
        check_answer(path, body, answer)
        if key:
            again = http.post(path, content=json.dumps(body), headers=keyed)
            check_answer(path, body, again)
            assert again.headers["x-request-id"] == answer.headers["x-request-id"]
            assert again.headers["idempotent-replayed"] == "true"

    ask()


@pytest.mark.parametrize(("path", "end"), [(CHAT, "chat"), (COMPLETIONS, "completion")])
def test_a_stream_that_is_taken_up_again_is_as_described(http: httpx.Client, path: str, end: str) -> None:
    body = {"model": MODEL, "stream": True, "max_tokens": 4}
    asked = {"messages": [{"role": "user", "content": "abc"}]} if path == CHAT else {"prompt": "abc"}
    request_id = http.post(path, json={**body, **asked}).headers["x-request-id"]
    answer = http.get(f"/v1/streams/{request_id}", params={"format": end})
    assert answer.status_code == httpx.codes.OK, answer.text
    assert read_events(answer.text, *events_of("/v1/streams/{stream}", "get"))


@pytest.mark.parametrize("path", RIGHT)
def test_what_the_description_makes_of_a_served_model_is_no_fault(bridge: RunningBridge, path: str) -> None:
    """Some of it is out of range, which is the caller's fault; what isn't is answered. Only too little time is nobody's."""
    operation = OPERATIONS[f"ours POST {path}"]
    model = {EMBEDDINGS: EMBED, CLASSIFICATIONS: CLASSIFY}.get(path, MODEL)

    @QUIET
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def ask(case: Any) -> None:
        body = {**case.body, "model": model} if isinstance(case.body, dict) else case.body
        if isinstance(body, dict) and path in (CHAT, COMPLETIONS) and isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 3)
        case.body = body
        given_ms = str((case.headers or {}).get("X-Headrace-Timeout-Ms", ""))
        began_s = time.monotonic()
        found = case.call(base_url=bridge.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=CALL_S)
        assert time.monotonic() - began_s < CALL_S
        told = [(name, value) for name, values in found.headers.items() for value in values]
        plain = [(name, value) for name, value in told if name.lower() not in {"content-encoding", "transfer-encoding"}]
        answer = httpx.Response(found.status_code, headers=plain, content=found.content)
        case.validate_response(found, checks=[response_schema_conformance])
        if answer.status_code == httpx.codes.OK:
            check_answer(path, body, answer)
            return
        ERROR.validate(answer.json())
        short = (given_ms.isdecimal() and int(given_ms) < TIMEOUT_MS) or isinstance(body.get("timeout"), int | float)
        assert answer.status_code < 500 or (answer.status_code == 504 and short), answer.text

    ask()


# --- the Open Inference Protocol --------------------------------------------------------------------------------------

NUMBERS: dict[str, Any] = {
    "BOOL": st.booleans(),
    **{f"{sign}INT{bits}": st.integers(-(1 << bits - 1) if not sign else 0, (1 << bits - (not sign)) - 1) for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": st.floats(width=16, allow_nan=False, allow_infinity=False) | st.sampled_from(["NaN", "Infinity", "-Infinity"]),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(["NaN", "Infinity", "-Infinity"]),
    "FP64": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
    "BYTES": TEXT,
}  # fmt: skip
"""By datatype, what an element may be in JSON."""
PARAMETERS = optional(
    {
        "timeout": st.integers(5_000_000, 86_400_000_000),
        "tier": st.sampled_from(["interactive", "batch"]),
        "cache_control": st.sampled_from(["no-cache", "no-store"]),
        "binary_data_output": st.booleans(),
    }
)


@st.composite
def tensors(draw: st.DrawFn, name: str, datatype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """An input in JSON."""
    count = elements(shape)
    data = draw(st.lists(NUMBERS[datatype], min_size=count, max_size=count))
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


def inputs_for(model: str, rows: int, width: int) -> st.SearchStrategy[list[Any]]:
    """What one of the models takes."""
    if model in (SUM, ADD):
        return st.tuples(*(tensors(name, "FP32", (rows, 3)) for name in "ab")).map(list)
    if model == RANKS:
        return st.tuples(tensors("scalar", "INT8", ()), tensors("cube", "INT8", (2, width, 2))).map(list)
    if model == FILES:
        return tensors("bytes", "BYTES", (rows,)).map(lambda found: [found])
    datatype = next(kind for kind in NUMBERS if identity(kind) == model)
    return tensors("x", datatype, (rows, width)).map(lambda found: [found])


@st.composite
def infers(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model, and a request for it."""
    model = draw(st.sampled_from([SUM, ADD, RANKS, FILES, *map(identity, NUMBERS)]))
    body: dict[str, Any] = {"inputs": draw(inputs_for(model, draw(st.integers(1, 3)), draw(st.integers(0, 3))))}
    more: dict[str, Any] = {"id": st.text(max_size=9), "parameters": PARAMETERS}
    return model, {**body, **draw(st.fixed_dictionaries({}, optional=more))}


def test_a_right_inference_is_answered_as_described(http: httpx.Client) -> None:
    @settings(QUIET, max_examples=4 * EXAMPLES)
    @given(asked=infers(), version=st.booleans())
    def ask(asked: tuple[str, dict[str, Any]], version: bool) -> None:
        model, body = asked
        path = f"/v2/models/{model}{'/versions/v1' if version else ''}/infer"
        answer = http.post(path, json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        binary = (body.get("parameters") or {}).get("binary_data_output")
        length = answer.headers.get("inference-header-content-length")
        assert (length is not None) == bool(binary)
        told = json.loads(answer.content[: int(length)] if length else answer.content)
        INFERENCE.validate(told)
        assert (told["model_name"], told.get("id", "")) == (model, body.get("id", ""))
        if length:
            sizes = sum(output["parameters"]["binary_data_size"] for output in told["outputs"])
            assert int(length) + sizes == len(answer.content)
            return
        for output in told["outputs"]:
            assert len(output["data"]) == math.prod(output["shape"])

    ask()


@pytest.mark.parametrize("how", ["generate", "generate_stream"])
def test_a_right_generation_is_answered_as_described(http: httpx.Client, how: str) -> None:
    parameters = {name: SAMPLING[name] for name in ("max_tokens", "temperature", "top_p", "seed", "stop", "n", "top_k")}

    @QUIET
    @given(text=WORDS, parameters=optional(parameters), flat=st.booleans())
    def ask(text: str, parameters: dict[str, Any], flat: bool) -> None:
        plain = {name: value for name, value in parameters.items() if value is not None and not isinstance(value, list)}
        body = {"text_input": text, **(plain if flat else {"parameters": plain})}
        answer = http.post(f"/v2/models/{MODEL}/{how}", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        if how == "generate":
            GENERATED.validate(answer.json())
            return
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.text.split("\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        for line in lines:
            GENERATED.validate(json.loads(line.removeprefix("data: ")))

    ask()
