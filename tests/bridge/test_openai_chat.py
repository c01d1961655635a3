"""Chats through the official client, on a real broker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from bridge.openai_answers import ChatAnswer, ChatChunk
from schemas.ids import is_request_id, unix_ms
from tests.bridge.conftest import KEY, MODEL, TENANT, RunningBridge


def script(**directions: Any) -> list[Any]:
    return [{"role": "user", "content": json.dumps(directions)}]


def body(stream: bool = True, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": script(tokens=["a", "b", "c"]), "stream": stream, **fields}


async def read_events(response: httpx.Response) -> list[tuple[str | None, str]]:
    """Server-sent events as (id, data); comments as (None, ": …")."""
    events: list[tuple[str | None, str]] = []
    event_id, data = None, None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif line.startswith(":"):
            events.append((None, line))
        elif not line and data is not None:
            events.append((event_id, data))
            event_id, data = None, None
    return events


async def stream_events(
    bridge: RunningBridge, payload: dict[str, Any]
) -> tuple[httpx.Response, list[tuple[str | None, str]]]:
    async with bridge.client() as client, client.stream("POST", "/v1/chat/completions", json=payload) as response:
        return response, await read_events(response)


def test_answers_the_official_client(bridge: RunningBridge) -> None:
    with openai.OpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        with client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], stream=True
        ) as stream:
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert [model.id for model in client.models.list()].count(MODEL) == 1
        assert client.models.retrieve(MODEL).created == 1_700_000_000
    assert answer.choices[0].message.content == streamed == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 5, 12)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_streams_tokens_in_order_whatever_a_former_owner_writes(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        messages = script(tokens=["a", "b", "c"], tail="!", zombie=True)
        chunks = [
            chunk async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        ]
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "abc!" == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_events_from_records_carry_ids_and_control_frames_none(bridge: RunningBridge) -> None:
    payload = body(messages=script(tokens=["a", "b"], gap_ms=30), stream_options={"include_usage": True})
    response, events = await stream_events(bridge, payload)
    assert response.headers["content-type"].startswith("text/event-stream")
    request_id = response.headers["x-request-id"]
    assert is_request_id(request_id)
    ids = [event_id for event_id, _ in events]
    assert ids[0] is None  # the role
    assert ids[-2:] == [None, None]  # the usage and [DONE]
    shown = [event_id for event_id in ids if event_id is not None]
    parts = [event_id.split(":") for event_id in shown]
    assert {part[0] for part in parts} == {request_id}
    offsets = [int(part[2]) for part in parts]
    assert offsets == sorted(set(offsets))
    assert len(ids[1:-2]) == len(shown)
    assert events[-1][1] == "[DONE]"


async def test_every_object_has_exactly_openais_fields(bridge: RunningBridge) -> None:
    payload = body(logprobs=True, top_logprobs=2, stream_options={"include_usage": True})
    _, events = await stream_events(bridge, payload)
    for _, data in events[:-1]:
        ChatChunk.model_validate_json(data)
    async with bridge.client() as client:
        response = await client.post("/v1/chat/completions", json=body(stream=False, logprobs=True, top_logprobs=2))
    answer = ChatAnswer.model_validate_json(response.content)
    request_id = response.headers["x-request-id"]
    assert answer.id == f"chatcmpl-{request_id}"
    assert answer.created == unix_ms(request_id) // 1000
    assert answer.system_fingerprint == "v1"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_is_not_sent_unasked(bridge: RunningBridge, options: dict[str, Any] | None) -> None:
    _, events = await stream_events(bridge, body(stream_options=options))
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_comes_once_and_last_when_asked_for(bridge: RunningBridge, n: int) -> None:
    _, events = await stream_events(bridge, body(n=n, stream_options={"include_usage": True}))
    assert events[-1][1] == "[DONE]"
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert [chunk["usage"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3 * n


async def test_several_choices_arrive_whole_under_their_index(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        messages = script(tokens=["x", "y"], tail="z", gap_ms=5)
        whole = await client.chat.completions.create(model=MODEL, messages=messages, n=2)
        texts, ends, roles = {0: "", 1: ""}, [], []
        async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.index] if choice.finish_reason else []
                roles += [choice.index] if choice.delta.role else []
    assert [choice.message.content for choice in whole.choices] == ["xyz", "xyz"]
    assert texts == {0: "xyz", 1: "xyz"}
    assert ends == roles == [0, 1]


async def test_logprobs_keep_bytes_that_are_no_character(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=script(tokens=["é"]), logprobs=True, top_logprobs=2
        )
        bare = await client.chat.completions.create(model=MODEL, messages=script(tokens=["é"]), logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    token = logprobs.content[0]
    assert (token.token, token.logprob, token.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [(top.token, top.bytes) for top in token.top_logprobs] == [("é", [0xC3, 0xA9]), ("\ufffd", [0xF0, 0x9F])]
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


async def test_the_log_gets_what_was_asked(bridge: RunningBridge) -> None:
    payload = {
        "model": MODEL,
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "u"},
        ],
        "max_completion_tokens": 9,
        "temperature": 0,
        "top_k": -1,
        "stop": "END",
        "stop_token_ids": [5],
        "seed": -3,
        "logit_bias": {"7": 1.5},
        "timeout": 12.5,
        "user": "someone",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
    }
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with bridge.client() as client:
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "X-Headrace-Timeout-Ms": "20000"}
        response = await client.post("/v1/chat/completions", json=payload, headers=headers)
    assert response.status_code == 200, response.text
    seen = bridge.responder.seen[response.headers["x-request-id"]]
    messages = seen.event.messages or ()
    assert [(m.role, m.content, m.name) for m in messages] == [("developer", "d", None), ("user", "ab", "u")]
    sampling = seen.event.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (9, 0.0, 0, ("END",))
    assert (sampling.stop_token_ids, sampling.seed, sampling.logit_bias) == ((5,), -3, {"7": 1.5})
    assert (seen.event.timeout_ms, seen.event.user, seen.event.stream) == (12_500, "someone", False)
    assert (seen.key, seen.grant.tenant, seen.grant.key_id) == (TENANT.encode(), TENANT, "good")
    assert seen.grant.reply.topic == "tokens"
    assert trace in seen.headers["traceparent"].decode()
    assert KEY not in repr(seen)


async def test_a_quiet_stream_is_kept_alive_by_comments_without_id(bridge: RunningBridge) -> None:
    _, events = await stream_events(bridge, body(messages=script(tokens=["a", "b"], gap_ms=900)))
    kinds = [data for _, data in events]
    assert ": keep-alive" in kinds
    assert all(event_id is None for event_id, data in events if data.startswith(":"))


async def test_many_calls_at_once_are_not_mixed_up(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:

        async def ask(i: int) -> str:
            messages = script(tokens=[f"{i}-", "x", f"-{i}"], gap_ms=3)
            if i % 2:
                return (await client.chat.completions.create(model=MODEL, messages=messages)).choices[
                    0
                ].message.content or ""
            stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*[ask(i) for i in range(60)])
    assert answers == [f"{i}-x-{i}" for i in range(60)]
