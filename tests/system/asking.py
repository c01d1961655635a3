"""One call at the front door, streamed or whole, and what came of it: the same for both endpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.system.running import MODEL, RunningStack

CHAT, COMPLETIONS = "chat/completions", "completions"
BOTH = pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
STREAMED = pytest.mark.parametrize("stream", [True, False])


def body_of(endpoint: str, content: Any, model: str = MODEL, **options: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": content}]} if endpoint == CHAT else {"prompt": content}
    return {"model": model, **asked, **options}


@dataclass
class Answer:
    """What came over HTTP, streamed or whole. `texts` and `ends` by choice; `chunks` are a stream's objects."""

    status: int
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usages: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    content_type: str = ""

    def take(self, item: dict[str, Any]) -> None:
        self.error = item.get("error") or self.error
        if item.get("usage") is not None:
            self.usages.append(item["usage"])
        for choice in item.get("choices", ()):
            index = choice["index"]
            said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            assert "�" not in said
            self.texts[index] = self.texts.get(index, "") + said
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"]


def heard(answer: Answer) -> tuple[int, str | None]:
    """The status, and the code of the error if there is one."""
    return answer.status, answer.error["code"] if answer.error else None


def call(stack: RunningStack, endpoint: str, body: dict[str, Any] | bytes, tenant: str = "acme") -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with (
        stack.http(tenant) as client,
        client.stream(
            "POST", f"/v1/{endpoint}", content=content, headers={"content-type": "application/json"}
        ) as response,
    ):
        answer = Answer(response.status_code, content_type=response.headers.get("content-type", ""))
        if not answer.content_type.startswith("text/event-stream"):
            answer.take(json.loads(response.read()))
            return answer
        for line in response.iter_lines():
            if line == "data: [DONE]":
                answer.finished = True
            elif line.startswith("data: "):
                assert not answer.finished
                answer.chunks.append(json.loads(line.removeprefix("data: ")))
                answer.take(answer.chunks[-1])
    return answer


def assert_served(stack: RunningStack, model: str = MODEL) -> None:
    answer = call(stack, CHAT, body_of(CHAT, "ordinary", model))
    assert answer.texts == {0: "ordinary"}, answer
