"""Chats through the official client, on a real broker."""

from __future__ import annotations

import json

import openai
import pytest

from bridge.openai_answers import ChatAnswer, ChatChunk
from tests.bridge.conftest import KEY, MODEL, RunningBridge


def script(**directions: object) -> list[dict[str, str]]:
    return [{"role": "user", "content": json.dumps(directions)}]


@pytest.fixture
def client(bridge: RunningBridge) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0)


async def test_streams_tokens_in_order(bridge: RunningBridge) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=script(tokens=["a", "b", "c"], tail="!", zombie=True), stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc!"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
