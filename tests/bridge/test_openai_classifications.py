"""Classifications by hand, on a real broker."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from bridge.openai_answers import ClassificationAnswer
from bridge.openapi import document
from tests.bridge.conftest import MODEL, RunningBridge
from tests.small_models import UNBOUNDED, rows_of

TEXTS, BYTES = "bridge-classify", "bridge-bytes"
RAW = bytes(range(256))


async def ask(bridge: RunningBridge, **body: Any) -> Any:
    async with bridge.client() as client:
        return await client.post("/v1/classifications", json=body)


@pytest.mark.parametrize(
    ("model", "given", "rows"),
    [
        (TEXTS, "ab", [b"ab"]),
        (TEXTS, ["ab", "abcdef"], [b"ab", b"abcdef"]),
        (TEXTS, [[104], [105, 106]], [b"h", b"ij"]),
        (TEXTS, [{"base64": "YWI="}, "c"], [b"ab", b"c"]),
        (BYTES, "é", ["é".encode()]),
        (BYTES, "", [b""]),
        (BYTES, {"base64": base64.b64encode(RAW).decode()}, [RAW]),
        (BYTES, [{"base64": base64.b64encode(RAW).decode()}, "text"], [RAW, b"text"]),
    ],
)
async def test_every_form(bridge: RunningBridge, model: str, given: Any, rows: list[bytes]) -> None:
    found = await ask(bridge, model=model, input=given, top_k=2)
    assert found.status_code == 200, found.text
    answer = ClassificationAnswer.model_validate_json(found.content)
    assert rows_of(bridge.responder.seen[found.headers["x-request-id"]].event) == rows
    assert [item.index for item in answer.data] == list(range(len(rows)))
    for item in answer.data:
        assert (item.label, item.score) == (item.classes[0].label, item.classes[0].score)
        assert [each.score for each in item.classes] == [0.5, 0.25]
    assert answer.usage.prompt_tokens == (sum(map(len, rows)) if model == TEXTS else 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": TEXTS, "input": ""}, "input"),
        ({"model": TEXTS, "input": ["a", ""]}, "input[1]"),
        ({"model": TEXTS, "input": {"base64": "/w=="}}, "input"),
        ({"model": BYTES, "input": [1, 2]}, "input"),
        ({"model": BYTES, "input": {"base64": "?"}}, "input.base64"),
        ({"model": BYTES, "input": [{"base64": "YQ=="}, {"base64": "Y"}]}, "input[1].base64"),
        ({"model": BYTES, "input": [{"hex": "61"}]}, "input[0]"),
        ({"model": BYTES, "input": "a", "top_k": 0}, "top_k"),
        ({"model": MODEL, "input": "a"}, "model"),
        ({"model": "bridge-embed", "input": "a"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(bridge: RunningBridge, body: dict[str, Any], param: str) -> None:
    found = await ask(bridge, **body)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == param
    if param == "model":
        assert TEXTS in found.json()["error"]["message"]


@pytest.mark.parametrize("given", [None, 1, {"hex": "61"}])
async def test_what_may_be_given_is_told_and_base64_with_it(bridge: RunningBridge, given: Any) -> None:
    found = await ask(bridge, model=BYTES, input=given)
    assert '{"base64": "…"}' in found.json()["error"]["message"]


async def test_scores_that_are_no_numbers_are_null(bridge: RunningBridge) -> None:
    found = await ask(bridge, model=TEXTS, input=["ab", UNBOUNDED], top_k=3)
    assert found.status_code == 200, found.text
    first, second = orjson.loads(found.content)["data"]
    assert [each["score"] for each in first["classes"]] == [0.5, 0.25, 0.125]
    assert (second["score"], [each["score"] for each in second["classes"]]) == (None, [None, None, None])


def test_both_are_described() -> None:
    paths = document()["paths"]
    for path, body in (("/v1/embeddings", "EmbeddingRequest"), ("/v1/classifications", "ClassificationRequest")):
        post = paths[path]["post"]
        assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(body)
        assert list(post["responses"]["200"]["content"]) == ["application/json"]
