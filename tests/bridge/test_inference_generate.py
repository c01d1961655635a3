"""Triton's `generate` and `generate_stream`, by hand, on a real broker."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.bridge.conftest import MODEL
from tests.bridge.tensors import SUM


def test_generate(http: httpx.Client) -> None:
    asked = {"text_input": "hello", "parameters": {"temperature": 0, "stream": False}, "max_tokens": 4, "id": "g"}
    answer = http.post(f"/v2/models/{MODEL}/generate", json=asked)
    assert answer.json() == {"model_name": MODEL, "model_version": "v1", "id": "g", "text_output": "hello"}
    assert http.post(f"/v2/models/{MODEL}/generate", json={"text_input": 3}).status_code == 400
    refused = http.post(f"/v2/models/{SUM}/generate", json={"text_input": "a"})
    assert (refused.status_code, "no input `text_input`" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "extra", "told"),
    [
        ("generate", {"stop": ["x"]}, "body.stop is no string, number or boolean: put it into sampling_parameters"),
        ("generate", {"parameters": {"logit_bias": {}}}, "parameters.logit_bias is no string"),
        ("generate", {"stream": True}, "stream must be false here; generate_stream is for the other"),
        ("generate_stream", {"parameters": {"stream": False}}, "stream must be true here; generate is for the other"),
    ],
)
def test_what_generate_takes_elsewhere_is_named(
    http: httpx.Client, path: str, extra: dict[str, Any], told: str
) -> None:
    answer = http.post(f"/v2/models/{MODEL}/{path}", json={"text_input": "a", **extra})
    assert answer.status_code == 400
    assert told in answer.json()["error"]


def test_generate_stream(http: httpx.Client) -> None:
    script = json.dumps({"tokens": ["a", "b", "c"], "gap_ms": 30})
    with http.stream("POST", f"/v2/models/{MODEL}/generate_stream", json={"text_input": script}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == "abc"
    assert len(events) > 1
    refused = http.post(f"/v2/models/{MODEL}/generate_stream", json={"text_input": '{"reject": "overloaded"}'})
    assert (refused.status_code, list(refused.json())) == (503, ["error"])
    broken = json.dumps({"tokens": ["a", "b"], "gap_ms": 30, "fail": "engine_error", "fail_after": 1})
    last = http.post(f"/v2/models/{MODEL}/generate_stream", json={"text_input": broken}).text.split("\n\n")[-2]
    assert json.loads(last[6:]) == {"error": "broke"}
