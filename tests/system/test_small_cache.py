"""The response cache of embeddings, classifications and inference, on real models: what is the same question, and what is another."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from schemas.events import GenerationStarted, InferenceAdmitted, InferenceCompleted, Quota
from tests.system.fixtures_small import MAGIKA, MINILM, SmallModels
from tests.system.running import CALL_WAIT_S, RunningStack
from tests.system.test_cache import outcome, told
from tests.system.test_quotas import tenant

pytestmark = pytest.mark.timeout(180)
EMBED, CLASSIFY = "/v1/embeddings", "/v1/classifications"
INFER_TEXT, INFER_FILE = f"/v2/models/{MINILM}/infer", f"/v2/models/{MAGIKA}/infer"
ANYWHERE = pytest.mark.parametrize("path", [EMBED, CLASSIFY, INFER_TEXT, INFER_FILE])
INPUTS = {INFER_TEXT: "text", INFER_FILE: "bytes"}


@dataclass(frozen=True)
class Caller:
    """Somebody at the front door of the small models."""

    stack: RunningStack
    client: httpx.Client

    def ask(self, path: str, body: dict[str, Any], control: str = "", key: str = "") -> httpx.Response:
        headers = {"cache-control": control} if control else {}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        answer = self.client.post(path, json=body, headers=headers)
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer

    def until_hit(self, path: str, body: dict[str, Any], key: str = "") -> httpx.Response:
        def look() -> httpx.Response | None:
            answer = self.ask(path, body, key=key)
            return answer if outcome(answer) == "hit" else None

        found: httpx.Response = self.stack.until(look, 20)
        return found


@pytest.fixture
def caller(stack: RunningStack, small: SmallModels) -> Iterator[Caller]:
    headers = {"authorization": f"Bearer {stack.keys['acme']}"}
    with httpx.Client(base_url=small.url, headers=headers, timeout=CALL_WAIT_S, trust_env=False) as client:
        yield Caller(stack, client)


def new_text() -> str:
    """One that nobody has asked about."""
    return f"import os  # {secrets.token_hex(16)}\n" * 4


def body_of(path: str, *texts: str, **options: Any) -> dict[str, Any]:
    if path in INPUTS:
        shown = {"name": INPUTS[path], "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}
        return {"inputs": [shown], **options}
    return {"model": MINILM if path == EMBED else MAGIKA, "input": list(texts), **options}


def answer_of(answer: httpx.Response) -> Any:
    body = answer.json()
    return body["outputs"] if "outputs" in body else body["data"]


@ANYWHERE
def test_the_same_twice_is_a_hit_and_everybody_says_so(stack: RunningStack, caller: Caller, path: str) -> None:
    name = f"twice-{secrets.token_hex(4)}"
    key = tenant(stack, name, Quota("interactive", tokens_per_day=1_000_000))
    body = body_of(path, new_text())
    first = caller.ask(path, body, key=key)
    assert (outcome(first), "age" in first.headers) == ("miss", False)
    hit = caller.until_hit(path, body, key=key)
    assert answer_of(hit) == answer_of(first)
    assert hit.json().get("usage") == first.json().get("usage")
    assert 0 <= int(hit.headers["age"]) < 60
    rid = hit.headers["x-request-id"]
    stack.ended(rid)
    (admitted,), (begun,) = told(stack, rid, InferenceAdmitted), told(stack, rid, GenerationStarted)
    assert admitted.cached and begun.cache_age_ms is not None
    assert {ending.worker_id for ending in told(stack, rid, InferenceCompleted)} == {"cache"}

    def totals() -> tuple[int, int]:
        lines = stack.command("tenants", "usage", name, "--tier", "interactive", "--json").stdout.splitlines()
        (found,) = [row for row in map(json.loads, lines) if row["scope"] == ""]
        return found["tokens"], found["running"]

    before = stack.until(lambda: (now := totals())[1] == 0 and now, 20)
    again = caller.ask(path, body, key=key)
    stack.ended(again.headers["x-request-id"])
    assert outcome(again) == "hit"
    assert totals() == before, "it costs no token"


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (EMBED, {"encoding_format": "base64"}),
        (EMBED, {"timeout": 40}),
        (CLASSIFY, {"top_k": 5}),  # which is the default
        (INFER_FILE, {"id": "another name of the caller's own"}),
        (INFER_TEXT, {"outputs": [{"name": "embedding", "parameters": {"binary_data": False}}]}),
    ],
    ids=str,
)
def test_what_only_looks_different_is_the_same_question(caller: Caller, path: str, options: dict[str, Any]) -> None:
    text = new_text()
    plain = options.get("outputs", []) and {"outputs": [{"name": "embedding"}]}
    known = answer_of(caller.until_hit(path, body_of(path, text, **dict(plain or {}))))
    other = caller.ask(path, body_of(path, text, **options))
    assert outcome(other) == "hit"
    if "encoding_format" not in options:
        assert answer_of(other) == known
        return
    (shown,) = answer_of(other)
    raw = np.frombuffer(base64.b64decode(shown["embedding"]), "<f4")
    assert raw.tolist() == np.array(known[0]["embedding"], "<f4").tolist()


def test_binary_data_out_of_the_cache_is_the_numbers_in_json(caller: Caller) -> None:
    text, asked = new_text(), {"name": "embedding"}
    (known,) = answer_of(caller.until_hit(INFER_TEXT, body_of(INFER_TEXT, text, outputs=[asked])))
    asked_raw = {**asked, "parameters": {"binary_data": True}}
    answer = caller.ask(INFER_TEXT, body_of(INFER_TEXT, text, outputs=[asked_raw]))
    assert outcome(answer) == "hit"
    raw = np.frombuffer(answer.content[int(answer.headers["inference-header-content-length"]) :], "<f4")
    assert raw.tolist() == np.array(known["data"], "<f4").tolist()


def widths(path: str, answer: httpx.Response) -> list[int]:
    """How much there is of each row, or of each output."""
    name = {EMBED: "embedding", CLASSIFY: "classes"}.get(path)
    if name is None:
        return [output["shape"][-1] for output in answer_of(answer)]
    return [len(item[name]) for item in answer_of(answer)]


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        (EMBED, {"dimensions": 128}, [128]),
        (EMBED, {"dimensions": 64, "encoding_format": "float"}, [64]),
        (CLASSIFY, {"top_k": 2}, [2]),
        (INFER_FILE, {"parameters": {"top_k": 3}}, [3, 3]),
        (INFER_FILE, {"parameters": {"top_k": 4}, "outputs": [{"name": "score"}]}, [4]),
    ],
    ids=str,
)
def test_what_has_another_answer_is_another_question(
    caller: Caller, path: str, options: dict[str, Any], expected: list[int]
) -> None:
    text = new_text()
    known = caller.until_hit(path, body_of(path, text))
    other = caller.ask(path, body_of(path, text, **options))
    assert (outcome(other), widths(path, other)) == ("miss", expected)
    assert widths(path, caller.until_hit(path, body_of(path, text, **options))) == expected
    assert answer_of(caller.ask(path, body_of(path, text))) == answer_of(known)


@ANYWHERE
def test_another_input_or_tenant_is_another_question(stack: RunningStack, caller: Caller, path: str) -> None:
    one, two = new_text(), "select * from t;\n" * 20 + secrets.token_hex(16)
    known = answer_of(caller.until_hit(path, body_of(path, one)))
    both = [caller.ask(path, body_of(path, *texts)) for texts in ((one, two), (two, one), (two,), (one + "x",))]
    assert [outcome(answer) for answer in both] == ["miss"] * 4
    assert len({json.dumps(answer_of(answer)) for answer in both}) == 4
    assert outcome(caller.ask(path, body_of(path, one), key=stack.keys["other"])) == "miss"
    assert answer_of(caller.until_hit(path, body_of(path, one))) == known


def test_the_outputs_that_are_asked_for_come_and_no_others(caller: Caller) -> None:
    text = new_text()
    for names in (["label"], ["score"], ["score", "label"], ["label", "score"], ["label"]):
        body = body_of(INFER_FILE, text, outputs=[{"name": name} for name in names])
        assert [output["name"] for output in answer_of(caller.ask(INFER_FILE, body))] == names
        assert [output["name"] for output in answer_of(caller.until_hit(INFER_FILE, body))] == names


@ANYWHERE
def test_what_the_caller_says_of_the_cache_is_heeded(caller: Caller, path: str) -> None:
    body = body_of(path, new_text())
    assert [outcome(caller.ask(path, body, "no-store")) for _ in range(3)] == [None] * 3
    assert outcome(caller.ask(path, body)) == "miss", "nothing was kept"
    caller.until_hit(path, body)
    assert [outcome(caller.ask(path, body, control)) for control in ("no-cache", "max-age=0")] == ["miss"] * 2
    assert outcome(caller.ask(path, body, "max-age=600")) == "hit"
    refused = caller.client.post(path, json=body, headers={"cache-control": "max-age=soon"})
    assert refused.status_code == httpx.codes.BAD_REQUEST
