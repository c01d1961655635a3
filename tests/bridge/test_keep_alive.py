"""A quiet stream is kept alive, and no client takes that for an event."""

from __future__ import annotations

from typing import Any

import openai

from tests.bridge.conftest import KEY, MODEL, RunningBridge
from tests.bridge.test_openai_chat import script


async def test_the_official_client_reads_over_keep_alives_after_an_event(bridge: RunningBridge) -> None:
    messages: Any = script(tokens=["a", "b", "c"], gap_ms=900)
    async with openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "abc"


async def test_a_keep_alive_ends_no_event(bridge: RunningBridge) -> None:
    payload = {"model": MODEL, "messages": script(tokens=["a", "b"], gap_ms=900), "stream": True}
    async with bridge.client() as client, client.stream("POST", "/v1/chat/completions", json=payload) as response:
        text = (await response.aread()).decode()
    assert ": keep-alive\n" in text
    assert ": keep-alive\n\n" not in text
