"""What a caller says of the response cache reaches the log on every way in, and what came of it is told with the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bridge.openapi import document
from tests.bridge.conftest import MODEL, RunningBridge
from tests.bridge.test_openai_chat import body, script
from tests.bridge.test_websocket import calling

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HIT: dict[str, Any] = {"cache_age_ms": 7_999}
MISS: dict[str, Any] = {"cache_key": "0" * 64}


def asked(path: str, stream: bool, **directions: Any) -> dict[str, Any]:
    if path == CHAT:
        return body(stream, messages=script(**directions))
    return {"model": MODEL, "prompt": json.dumps(directions), "stream": stream}


def told(response: httpx.Response) -> tuple[str | None, str | None]:
    assert response.status_code == 200
    return response.headers.get("x-headrace-cache"), response.headers.get("age")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_answer_tells_where_it_comes_from(bridge: RunningBridge, path: str, stream: bool) -> None:
    async with bridge.client() as client:
        hit = await client.post(path, json=asked(path, stream, **HIT))
        miss = await client.post(path, json=asked(path, stream, **MISS))
        apart = await client.post(path, json=asked(path, stream))
    assert (told(hit), told(miss), told(apart)) == (("hit", "7"), ("miss", None), (None, None))


async def test_of_several_prompts_all_must_be_hits(bridge: RunningBridge) -> None:
    found = {}
    for name, scripts in {"all": [HIT, {"cache_age_ms": 12_000}], "some": [HIT, MISS], "one": [{}, HIT]}.items():
        async with bridge.client() as client:
            response = await client.post(TEXT, json={"model": MODEL, "prompt": [json.dumps(each) for each in scripts]})
        found[name] = told(response)
    assert found == {"all": ("hit", "12"), "some": ("miss", None), "one": ("miss", None)}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_callers_words_reach_the_log(bridge: RunningBridge, path: str) -> None:
    async with bridge.client() as client:
        headers = [("Cache-Control", "no-cache"), ("Cache-Control", "max-age=5")]
        said = await client.post(path, json=asked(path, False), headers=httpx.Headers(headers))
        silent = await client.post(path, json=asked(path, False))
    seen = [bridge.responder.seen[response.headers["x-request-id"]].event.cache_control for response in (said, silent)]
    assert seen == ["no-cache, max-age=5", None]


async def test_words_that_make_no_sense_are_refused_by_the_header(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        response = await client.post(CHAT, json=asked(CHAT, True), headers={"Cache-Control": "max-age=x"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "Cache-Control")


async def test_a_socket_says_and_is_told_the_same(bridge: RunningBridge) -> None:
    chat = {"type": "request", "endpoint": "chat.completions"}
    async with calling(bridge) as caller:
        for name, directions in {"hit": HIT, "miss": MISS, "apart": {}}.items():
            await caller.say(**chat, id=name, cache_control="max-age=60", body=asked(CHAT, True, **directions))
        heard = await caller.until_ended("hit", "miss", "apart")
        found = {name: messages[0].get("cache") for name, messages in heard.items()}
        assert found == {"hit": {"outcome": "hit", "age_ms": 7_999}, "miss": {"outcome": "miss"}, "apart": None}
        assert bridge.responder.seen[heard["hit"][0]["request_id"]].event.cache_control == "max-age=60"
        for wrong in (7, "max-age=-1"):
            await caller.say(**chat, id="x", cache_control=wrong, body=asked(CHAT, True))
            (error,) = (await caller.until_ended("x"))["x"]
            assert (error["type"], error["error"]["param"]) == ("error", "cache_control")


def test_the_page_tells_of_them() -> None:
    post = document()["paths"][CHAT]["post"]
    assert {"X-Headrace-Cache", "Age"} <= post["responses"]["200"]["headers"].keys()
    assert "Cache-Control" in [parameter["name"] for parameter in post["parameters"]]
