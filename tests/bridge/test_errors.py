"""Whatever is refused is refused with a status, a code and the field's name, before anything reaches the log where possible."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from bridge.openai_answers import ErrorAnswer
from tests.bridge.conftest import BATCH_ONLY, DISABLED, KEY, MODEL, REVOKED, RunningBridge
from tests.bridge.test_openai_chat import body, read_events, script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def refused(bridge: RunningBridge, path: str, payload: Any, **options: Any) -> ErrorAnswer:
    """The error, which must have left no trace in the log."""
    before = len(bridge.responder.seen)
    async with bridge.client() as client:
        response = await client.post(path, json=payload, **options)
    assert response.status_code >= 400, response.text
    assert "x-request-id" not in response.headers
    assert len(bridge.responder.seen) == before
    return ErrorAnswer.model_validate_json(response.content)


@pytest.mark.parametrize("key", [None, "", "hr-unknown", REVOKED, DISABLED, "x" * 10_000])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/models", f"/v1/models/{MODEL}"])
async def test_only_known_keys_get_in(bridge: RunningBridge, key: str | None, path: str) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".strip()}
    async with httpx.AsyncClient(base_url=bridge.url, headers=headers) as client:
        response = await client.request("GET" if "models" in path else "POST", path)
    assert response.status_code == 401
    error = ErrorAnswer.model_validate_json(response.content).error
    assert (error.code, error.type) == ("invalid_api_key", "authentication_error")
    assert not key or len(key) < 5 or key not in response.text


async def test_a_key_for_batches_may_not_make_live_calls(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=BATCH_ONLY, max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(model=MODEL, messages=script())


UNSERVED = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("response_format", {"type": "json_object"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "v"}),
    ("prediction", {}),
    ("store", True),
    ("metadata", {"a": "b"}),
    ("reasoning_effort", "low"),
    ("service_tier", "flex"),
    ("web_search_options", {}),
    ("guided_json", {}),
    ("no_such_thing", None),
    ("prompt", "x"),
]


@pytest.mark.parametrize(("field", "value"), UNSERVED)
async def test_a_chat_parameter_that_is_not_served_is_named(bridge: RunningBridge, field: str, value: Any) -> None:
    error = (await refused(bridge, CHAT, body(**{field: value}))).error
    assert (error.code, error.param) == ("unsupported_parameter", field)
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2), ("messages", []), ("store", True)]
)
async def test_a_completion_parameter_that_is_not_served_is_named(
    bridge: RunningBridge, field: str, value: Any
) -> None:
    error = (await refused(bridge, TEXT, {"model": MODEL, "prompt": "x", field: value})).error
    assert (error.code, error.param) == ("unsupported_parameter", field)


async def test_what_asks_for_nothing_is_taken(bridge: RunningBridge) -> None:
    nothing: dict[str, Any] = {
        "tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "response_format": None,
        "modalities": ["text"], "store": False, "metadata": {}, "service_tier": "auto", "stop": None, "n": None, "seed": None,
        "temperature": None, "logit_bias": None, "stream_options": None, "logprobs": False, "top_logprobs": None,
    }  # fmt: skip
    earlier: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
        "function_call": None,
    }
    async with bridge.client() as client:
        response = await client.post(
            CHAT, json=body(stream=False, messages=[earlier, *script(tokens=["y"])], **nothing)
        )
    assert response.status_code == 200, response.text


CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "zork": 1}]}, "messages[0].zork"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1 << 70}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"seed": 1 << 63}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["x", 1]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [1 << 64]}, "stop_token_ids[0]"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"zork": 1}}, "stream_options.zork"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": 1e9}, "timeout"),
    ({"user": "u" * 600}, "user"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), CHAT_FAULTS)
async def test_a_chats_fault_is_named(bridge: RunningBridge, fields: dict[str, Any], param: str) -> None:
    error = (await refused(bridge, CHAT, body(**fields))).error
    assert error.param == param
    assert error.type == "invalid_request_error"


async def test_top_logprobs_beyond_the_most_are_named(bridge: RunningBridge) -> None:
    error = (await refused(bridge, CHAT, body(logprobs=True, top_logprobs=21))).error
    assert error.param == "top_logprobs"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (None, "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([True], "prompt[0]"),
        ([1, 1 << 63], "prompt[1]"),
        (["a"] * 17, "prompt"),
        ({"a": 1}, "prompt"),
    ],
)
async def test_a_prompts_fault_is_named_and_the_next_call_is_served(
    bridge: RunningBridge, prompt: Any, param: str
) -> None:
    error = (await refused(bridge, TEXT, {"model": MODEL, "prompt": prompt})).error
    assert error.param == param
    async with bridge.client() as client:
        assert (await client.post(TEXT, json={"model": MODEL, "prompt": "x"})).status_code == 200


@pytest.mark.parametrize("value", ["-1", "1.5", "x", "9" * 30, "0"])
async def test_a_timeout_header_that_is_no_time_is_refused(bridge: RunningBridge, value: str) -> None:
    await refused(bridge, CHAT, body(), headers={"X-Headrace-Timeout-Ms": value})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        ("context_length_exceeded", 400, openai.BadRequestError),
        ("model_not_found", 404, openai.NotFoundError),
        ("rate_limited", 429, openai.RateLimitError),
        ("overloaded", 503, openai.InternalServerError),
        ("deadline_exceeded", 504, openai.InternalServerError),
    ],
)
async def test_a_refusal_in_the_log_is_a_status_and_never_a_stream(
    bridge: RunningBridge, reason: str, status: int, kind: type[openai.APIStatusError], stream: bool
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(kind) as caught:
            messages = script(reject=reason, param="sampling.max_tokens", retry_after_ms=1500)
            await client.chat.completions.create(model=MODEL, messages=messages, stream=stream)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, reason, "max_tokens")
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.response.headers["x-request-id"] in bridge.responder.seen


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(bridge: RunningBridge, stream: bool) -> None:
    async with bridge.client() as client:
        response = await client.post(
            CHAT, json=body(stream=stream, messages=script(tokens=["a"], fail="engine_error", fail_after=0))
        )
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "broke",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


async def test_a_failure_after_tokens_is_an_event_and_no_done_follows(bridge: RunningBridge) -> None:
    payload = body(messages=script(tokens=["a", "b", "c"], fail="worker_lost", fail_after=2, gap_ms=20))
    async with bridge.client() as client, client.stream("POST", CHAT, json=payload) as response:
        assert response.status_code == 200
        events = await read_events(response)
    assert json.loads(events[-1][1])["error"]["code"] == "worker_lost"
    assert events[-1][0] is None  # whoever comes back after the tokens is told again
    assert "[DONE]" not in [data for _, data in events]
    texts = [json.loads(data)["choices"][0]["delta"].get("content", "") for _, data in events[:-1]]
    assert "".join(texts) == "ab"


async def test_the_official_client_raises_on_a_broken_stream(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        messages = script(tokens=["a", "b"], fail="engine_error", fail_after=1, gap_ms=50)
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="broke"):
            async for _ in stream:
                pass


async def test_a_total_that_differs_from_the_stream_is_a_failure(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        response = await client.post(
            CHAT, json=body(stream=False, messages=script(tokens=["a"], fail="engine_error", fail_after=1, repeat=2))
        )
    assert response.status_code == 500


async def test_paths_and_methods_that_are_not_there(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        missing = await client.get("/v1/nothing")
        wrong = await client.get(CHAT)
        model = await client.get("/v1/models/none/such")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]
    assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
