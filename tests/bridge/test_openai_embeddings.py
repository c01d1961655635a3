"""Embeddings through the official client and by hand, on a real broker."""

from __future__ import annotations

import base64
import json
import struct
import threading
from typing import Any

import openai
import orjson
import pytest

from bridge import app
from bridge.body import PARSED_AT_ONCE_BYTES
from bridge.openai_answers import EmbeddingAnswer
from tests.bridge.conftest import KEY, MODEL, RunningBridge
from tests.small_models import SIZE, UNBOUNDED, vector

EMBED, CLASSIFY = "bridge-embed", "bridge-classify"


def rounded(numbers: list[float]) -> list[float]:
    return list(struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers)))


@pytest.fixture
def client(bridge: RunningBridge) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ("hello", [b"hello"]),
        (["a", "naïve 🦉"], [b"a", "naïve 🦉".encode()]),
        ([104, 105], [b"hi"]),
        ([[104, 105], [106]], [b"hi", b"j"]),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_every_form_in_both_encodings(
    client: openai.AsyncOpenAI, bridge: RunningBridge, given: Any, rows: list[bytes], encoding: Any
) -> None:
    async with client:
        options = {} if encoding is None else {"encoding_format": encoding}
        found = await client.embeddings.create(model=EMBED, input=given, user="u", **options)
    for index, (item, row) in enumerate(zip(found.data, rows, strict=True)):
        numbers: Any = item.embedding
        if encoding == "base64":
            numbers = struct.unpack(f"<{SIZE}f", base64.b64decode(numbers))
        assert item.index == index
        assert rounded(list(numbers)) == rounded(vector(row))
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, rows))
    request_id = (found.model_extra or {})["id"].removeprefix("embd-")
    event = bridge.responder.seen[request_id].event
    assert (event.model, event.user, event.messages, event.prompt) == (EMBED, "u", None, None)


async def test_a_number_that_is_not_finite_is_null_and_exact_in_base64(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        asked = {"model": EMBED, "input": ["ab", UNBOUNDED]}
        plain = await client.post("/v1/embeddings", json=asked)
        exact = await client.post("/v1/embeddings", json={**asked, "encoding_format": "base64"})
    first, second = (item["embedding"] for item in orjson.loads(plain.content)["data"])
    assert (rounded(first), second[:3]) == (rounded(vector(b"ab")), [None, None, None])
    assert second[3] == pytest.approx(0.1)
    EmbeddingAnswer.model_validate_json(plain.content)
    data = base64.b64decode(exact.json()["data"][1]["embedding"])
    assert data == struct.pack(f"<{SIZE}f", *vector(UNBOUNDED.encode()))


async def test_dimensions_and_the_answers_form(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        found = await client.post("/v1/embeddings", json={"model": EMBED, "input": ["ab", "c"], "dimensions": 2})
    answer = EmbeddingAnswer.model_validate_json(found.content)
    assert [len(item.embedding) for item in answer.data] == [2, 2]
    assert found.headers["x-request-id"] == answer.id.removeprefix("embd-")


async def test_a_repeat_under_a_key_is_the_first_s_answer(bridge: RunningBridge) -> None:
    body, key = {"model": EMBED, "input": "again"}, {"Idempotency-Key": "embed-again"}
    async with bridge.client() as client:
        first = await client.post("/v1/embeddings", json=body, headers=key)
        second = await client.post("/v1/embeddings", json=body, headers=key)
    assert first.json() == second.json()
    assert second.headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [1, -3]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [[1, 1 << 31]]}, "input[0][1]"),
        ({"input": {"base64": "YQ=="}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": None}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": SIZE + 1}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate": True}, "truncate"),
        ({"user": "u" * 513}, "user"),
        ({"model": MODEL}, "model"),
        ({"model": CLASSIFY}, "model"),
    ],
)
async def test_what_is_wrong_is_named_and_never_reaches_the_log(
    bridge: RunningBridge, change: dict[str, Any], param: str
) -> None:
    before = len(bridge.responder.seen)
    async with bridge.client() as client:
        found = await client.post("/v1/embeddings", json={"model": EMBED, "input": "a", **change})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
    if param == "model":
        assert EMBED in found.json()["error"]["message"]
    assert len(bridge.responder.seen) == before


async def test_the_most_inputs_are_one_request(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        before = len(bridge.responder.seen)
        found = await client.post("/v1/embeddings", json={"model": EMBED, "input": ["a"] * 2048})
    assert len(found.json()["data"]) == 2048
    assert len(bridge.responder.seen) == before + 1


async def test_an_unknown_model_and_a_refusal_keep_their_status_and_name_the_callers_field(
    bridge: RunningBridge,
) -> None:
    refused = json.dumps({"reject": "context_length_exceeded", "param": "inputs"})
    async with bridge.client() as client:
        unknown = await client.post("/v1/embeddings", json={"model": "nobody", "input": "a"})
        long = await client.post("/v1/embeddings", json={"model": EMBED, "input": refused})
        late = await client.post(
            "/v1/embeddings",
            json={"model": EMBED, "input": json.dumps({"first_ms": 60_000})},
            headers={"X-Headrace-Timeout-Ms": "300"},
        )
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert (long.status_code, long.json()["error"]["param"]) == (400, "input")
    assert late.status_code == 504


async def test_a_large_answer_is_written_beside_the_loop(
    bridge: RunningBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[str] = []

    def noted(rendering: Any) -> bytes:
        where.append(threading.current_thread().name)
        return made(rendering)

    made = app._body
    monkeypatch.setattr(app, "_body", noted)
    async with bridge.client() as client:
        for limit in (PARSED_AT_ONCE_BYTES, 0):
            monkeypatch.setattr(app, "PARSED_AT_ONCE_BYTES", limit)
            answer = await client.post("/v1/embeddings", json={"model": EMBED, "input": "abc"})
            assert answer.json()["data"][0]["object"] == "embedding"
    assert where[0] == "bridge"
    assert where[1] != "bridge"
