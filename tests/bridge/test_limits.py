"""What is left of a tenant's limits is told with each answer and each refusal, on every way in."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest

from bridge.limits import RATE_HEADERS, least, rate_headers, rate_object
from bridge.openapi import document
from infra import ports
from schemas.events import Rate, Rates
from tests.bridge.conftest import KEY, MODEL, RunningBridge, start_bridge, stop_bridge
from tests.bridge.test_openai_chat import body, read_events, script
from tests.bridge.test_websocket import calling

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EMBED, CLASSIFY = "/v1/embeddings", "/v1/classifications"
INFER, INFER_TEXT = "/v2/models/bridge-embed/infer", f"/v2/models/{MODEL}/infer"
GENERATE, GENERATE_STREAM = f"/v2/models/{MODEL}/generate", f"/v2/models/{MODEL}/generate_stream"
WAYS = [
    *((path, stream) for path in (CHAT, TEXT) for stream in (False, True)),
    *((path, False) for path in (EMBED, CLASSIFY, INFER, INFER_TEXT, GENERATE)),
    (GENERATE_STREAM, True),
]
TOLD = {"requests": [60, 59, 900], "tokens": [1_000, 744, 7_660]}
HEADERS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "900ms",
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "744",
    "x-ratelimit-reset-tokens": "7.66s",
}
LIMITS = {unit: dict(zip(("limit", "remaining", "reset_ms"), numbers, strict=True)) for unit, numbers in TOLD.items()}


def told(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit")}


def asked(path: str, stream: bool, **directions: Any) -> dict[str, Any]:
    if path == CHAT:
        return body(stream, messages=script(**directions))
    text = json.dumps(directions)
    if path in (EMBED, CLASSIFY):
        return {"model": "bridge-embed" if path == EMBED else "bridge-classify", "input": text}
    if path in (INFER, INFER_TEXT):
        name = "text" if path == INFER else "text_input"
        return {"inputs": [{"name": name, "datatype": "BYTES", "shape": [1], "data": [text]}]}
    if path in (GENERATE, GENERATE_STREAM):
        return {"text_input": text, "stream": stream}
    return {"model": MODEL, "prompt": text, "stream": stream}


# --- merging ---------------------------------------------------------------------------------------------------------


def test_of_several_requests_the_least_that_is_left_is_told() -> None:
    early = Rates(Rate(60, 3, 100), Rate(1_000, 50, 900))
    late = Rates(Rate(60, 2, 200), Rate(500, 50, 1_000))
    assert least([early, None, late, Rates()]) == Rates(Rate(60, 2, 200), Rate(500, 50, 1_000))
    assert least([Rates(Rate(60, 3, 100))]) == Rates(Rate(60, 3, 100))
    assert least([None]) is least([]) is None


def test_what_is_not_limited_is_not_told() -> None:
    assert rate_headers(None) == rate_object(None) == rate_object(Rates()) == {}
    assert set(rate_headers(Rates(tokens=Rate(5, 4, 0)))) == {name for name in RATE_HEADERS if "tokens" in name}
    assert rate_object(Rates(tokens=Rate(5, 4, 0))) == {
        "rate_limits": {"tokens": {"limit": 5, "remaining": 4, "reset_ms": 0}}
    }


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "stream"), WAYS)
async def test_an_answer_tells_what_is_left(bridge: RunningBridge, path: str, stream: bool) -> None:
    async with bridge.client() as client:
        limited = await client.post(path, json=asked(path, stream, tokens=["a", "b"], rates=TOLD))
        tokens_alone = await client.post(path, json=asked(path, stream, rates={"tokens": TOLD["tokens"]}))
        unlimited = await client.post(path, json=asked(path, stream))
    assert [response.status_code for response in (limited, tokens_alone, unlimited)] == [200] * 3
    assert told(limited) == HEADERS
    assert told(tokens_alone) == {name: value for name, value in HEADERS.items() if name.endswith("tokens")}
    assert told(unlimited) == {}


@pytest.mark.parametrize(("path", "stream"), WAYS)
async def test_a_refusal_tells_what_is_left_and_when_to_come_again(
    bridge: RunningBridge, path: str, stream: bool
) -> None:
    refused = asked(path, stream, reject="rate_limited", retry_after_ms=7_660, rates=TOLD)
    async with bridge.client() as client:
        response = await client.post(path, json=refused)
    assert response.status_code == 429
    assert told(response) == HEADERS
    assert response.headers["retry-after"] == "8"
    error = response.json()["error"]
    assert error == "no" if path.startswith("/v2") else error["code"] == "rate_limited"


async def test_the_official_client_finds_them(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=script(rates=TOLD))
        assert raw.headers["x-ratelimit-remaining-tokens"] == "744"
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=script(reject="rate_limited", rates=TOLD))
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "59"


async def test_of_several_prompts_the_least_left_is_told(bridge: RunningBridge) -> None:
    prompts = [
        json.dumps({"tokens": ["a"], "rates": {"requests": [60, left, 900], "tokens": [1_000, left * 10, 7_660]}})
        for left in (41, 40, 42)
    ]
    async with bridge.client() as client:
        response = await client.post(TEXT, json={"model": MODEL, "prompt": prompts})
    assert told(response)["x-ratelimit-remaining-requests"] == "40"
    assert told(response)["x-ratelimit-remaining-tokens"] == "400"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_takeover_leaves_what_was_told_at_the_start(bridge: RunningBridge, stream: bool) -> None:
    messages = script(tokens=["a", "b", "c"], takeover_after=1, rates=TOLD)
    async with bridge.client() as client:
        response = await client.post(CHAT, json=body(stream, messages=messages))
    assert told(response) == HEADERS


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_after_the_start_tells_them_too(bridge: RunningBridge, stream: bool) -> None:
    messages = script(tokens=["a"], fail="engine_error", fail_after=0, rates=TOLD)
    async with bridge.client() as client:
        response = await client.post(CHAT, json=body(stream, messages=messages))
    assert response.status_code == 500
    assert told(response) == HEADERS


@pytest.mark.parametrize("directions", [{"tokens": ["a", "b"]}, {"reject": "rate_limited"}])
async def test_a_replay_tells_nothing_of_limits_as_they_were(bridge: RunningBridge, directions: dict[str, Any]) -> None:
    async with bridge.client() as client:
        first = await client.post(CHAT, json=body(messages=script(**directions, rates=TOLD)))
        assert told(first) == HEADERS
        async with client.stream("GET", f"/v1/streams/{first.headers['x-request-id']}") as again:
            await read_events(again)
    assert again.status_code == first.status_code
    assert told(again) == {}


async def test_a_page_of_another_origin_may_read_them(bridge: RunningBridge) -> None:
    settings = dataclasses.replace(
        bridge.settings,
        port=ports.free_port(),
        grpc_port=0,
        ops_port=0,
        instance="bridge-tests-cors",
        cors_origins=("https://page.example",),
    )
    running, thread = start_bridge(settings, bridge.responder)
    try:
        async with running.client() as client:
            response = await client.post(
                CHAT, json=body(False, messages=script(rates=TOLD)), headers={"Origin": "https://page.example"}
            )
    finally:
        stop_bridge(running, thread)
    exposed = {name.strip().lower() for name in response.headers["access-control-expose-headers"].split(",")}
    assert {"x-request-id", "retry-after", *RATE_HEADERS} <= exposed
    assert told(response) == HEADERS


def test_the_document_names_the_headers() -> None:
    for path in (CHAT, TEXT, EMBED, CLASSIFY):
        responses = document()["paths"][path]["post"]["responses"]
        for status in ("200", "429"):
            assert set(RATE_HEADERS) <= set(responses[status]["headers"])
        assert "Retry-After" in responses["429"]["headers"]
    assert set(RATE_HEADERS) == set(HEADERS)


# --- on a socket -----------------------------------------------------------------------------------------------------


async def test_a_socket_tells_them_in_started_and_in_a_refusal(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        await caller.ask("a", messages=script(tokens=["x"], rates=TOLD))
        await caller.ask("b", messages=script(reject="rate_limited", retry_after_ms=7_660, rates=TOLD))
        await caller.ask("c", messages=script(tokens=["z"]))
        heard = await caller.until_ended("a", "b", "c")
    assert heard["a"][0]["type"] == "started"
    assert heard["a"][0]["rate_limits"] == LIMITS
    (refused,) = heard["b"]
    assert (refused["error"]["code"], refused["retry_after_ms"]) == ("rate_limited", 7_660)
    assert refused["rate_limits"] == LIMITS
    assert "rate_limits" not in heard["c"][0]
