"""Completions through the official client, on a real broker."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from bridge.openai_answers import CompletionAnswer
from tests.bridge.conftest import KEY, MODEL, RunningBridge


@pytest.fixture
def client(bridge: RunningBridge) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{bridge.url}/v1", api_key=KEY, max_retries=0)


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
async def test_every_form_of_prompt(client: openai.AsyncOpenAI, bridge: RunningBridge, prompt: Any) -> None:
    async with client:
        answer = await client.completions.create(model=MODEL, prompt=prompt)
        stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True)
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].text == "hi" == "".join(chunk.choices[0].text for chunk in chunks)
    assert answer.id.startswith("cmpl-")
    event = bridge.responder.seen[answer.id.removeprefix("cmpl-")].event
    assert event.messages is None
    assert (event.prompt, event.prompt_token_ids) == (
        ("hi", None) if "hi" in (prompt, prompt[0]) else (None, (104, 105))
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_choices(client: openai.AsyncOpenAI, stream: bool) -> None:
    texts = dict.fromkeys(range(6), "")
    async with client:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        found = await client.completions.create(model=MODEL, prompt=["a", "bb", "ccc"], n=2, **options)
        answers = [chunk async for chunk in found] if stream else [found]
    for answer in answers:
        for choice in answer.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == ["a", "a", "bb", "bb", "ccc", "ccc"]
    usage = answers[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (21, 12)


async def test_logprobs_are_parallel_lists_with_running_offsets(bridge: RunningBridge) -> None:
    script = json.dumps({"tokens": ["ab", "é", "c"], "gap_ms": 10})
    async with bridge.client() as client:
        whole = await client.post("/v1/completions", json={"model": MODEL, "prompt": script, "logprobs": 2})
        streamed = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": script, "logprobs": 2, "stream": True}
        )
    answer = CompletionAnswer.model_validate_json(whole.content)
    found = answer.choices[0].logprobs
    assert found is not None
    assert (found.tokens, found.text_offset) == (["ab", "é", "c"], [0, 2, 3])
    assert found.top_logprobs[0] == {"ab": -0.5, "\ufffd": -1.5}
    frames = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    chunks = [CompletionAnswer.model_validate_json(frame) for frame in frames]
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [offset for found in logprobs if found is not None for offset in found.text_offset] == [0, 2, 3]


async def test_one_refused_prompt_refuses_the_call_and_cancels_the_others(
    client: openai.AsyncOpenAI, bridge: RunningBridge
) -> None:
    prompts = [
        json.dumps({"tokens": ["a"], "hang": True, "first_ms": 3000, "mark": "left"}),
        json.dumps({"reject": "overloaded"}),
    ]
    async with client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model=MODEL, prompt=prompts)
    assert caught.value.status_code == 503
    request_id = caught.value.response.headers["x-request-id"]
    await bridge.until(lambda: request_id in bridge.responder.cancelled)
