"""The main path with every kind of caller: the official client, a WebSocket, the log itself, and the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import websockets

from cli.timeline import Timeline
from tests.system.running import MODEL, ROOT, RunningStack, script

pytestmark = pytest.mark.timeout(240)


def ask(stack: RunningStack, content: str, tenant: str = "acme", **options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": content}]
    return stack.client(tenant).chat.completions.create(model=MODEL, messages=messages, **options)


def names(timeline: Timeline) -> list[str]:
    return [step.read.name for step in timeline.steps]


def test_a_chat_is_answered_whole(stack: RunningStack) -> None:
    answer = ask(stack, "Hello, wörld", seed=1)
    assert answer.choices[0].message.content == "Hello, wörld"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("Hello, wörld".encode()) + 1


def test_a_chat_is_streamed_and_equals_the_whole(stack: RunningStack) -> None:
    directions = script(hex=["f09f", "98", "80", "41"], repeat=20, token_ms=2)
    whole = ask(stack, directions).choices[0].message.content
    chunks = list(ask(stack, directions, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole == "\U0001f600A" * 20
    assert not any("�" in piece for piece in pieces)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_the_asynchronous_client_streams_many_at_once(stack: RunningStack) -> None:
    async def one(number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": script(tokens=[f"answer {number} "], repeat=5, token_ms=5)}]
        async with stack.async_client() as client:
            stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    answers = await asyncio.gather(*(one(number) for number in range(24)))
    assert answers == [f"answer {number} " * 5 for number in range(24)]


def test_completions_and_models(stack: RunningStack) -> None:
    client = stack.client()
    assert client.completions.create(model=MODEL, prompt="plain").choices[0].text == "plain"
    assert MODEL in [model.id for model in client.models.list()]


def test_refusals_are_statuses_before_the_stream(stack: RunningStack) -> None:
    with pytest.raises(openai.NotFoundError):
        stack.client().chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(stack, "x" * 5000, stream=True)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        stack.client().with_options(api_key="hr-wrong").models.list()


async def test_a_websocket_carries_several_calls(stack: RunningStack) -> None:
    url = stack.base_url.replace("http", "ws") + "/v1/stream"
    headers = {"Authorization": f"Bearer {stack.keys['acme']}"}
    texts = {"a": "", "b": ""}
    async with websockets.connect(url, additional_headers=headers, proxy=None) as socket:
        for name in texts:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": script(tokens=[name], repeat=10, token_ms=5)}],
            }
            await socket.send(json.dumps({"type": "request", "id": name, "endpoint": "chat.completions", "body": body}))
        left = set(texts)
        while left:
            message = json.loads(await asyncio.wait_for(socket.recv(), 30))
            if message["type"] == "chunk":
                for choice in message["data"].get("choices", ()):
                    texts[message["id"]] += choice["delta"].get("content") or ""
            if message["type"] in ("done", "error"):
                left.discard(message["id"])
    assert texts == {"a": "a" * 10, "b": "b" * 10}


def test_the_direct_example_reads_its_own_topic(stack: RunningStack, tmp_path: Path) -> None:
    grant = tmp_path / "grant.json"
    grant.write_text(stack.command("tenants", "grant", "other", "--json").stdout)
    done = stack.run([sys.executable, str(ROOT / "docs/direct.py"), str(grant), MODEL, script(tokens=["di", "rect"])])
    assert done.stdout.startswith("direct\n[InferenceCompleted")
    request_id = done.stdout.split(", ")[1].split("]")[0]
    timeline = stack.ended(request_id)
    assert timeline.facts["tenant"] == "other"
    assert {step.read.topic for step in timeline.steps if step.read.name == "TokensGenerated"} == {"tokens.other"}


def test_explain_tells_the_whole_story(stack: RunningStack) -> None:
    answer = ask(stack, "Tell me")
    stack.ended(answer.id.split("-", 1)[1])
    told = json.loads(stack.command("explain", answer.id, "--json").stdout)
    kinds = [event["event"] for event in told["events"]]
    for kind in (
        "InferenceRequested",
        "InferenceAdmitted",
        "InferenceScheduled",
        "GenerationStarted",
        "TokensGenerated",
    ):
        assert kind in kinds
    assert told["outcome"] == "completed"
    assert told["tokens"]["completion"] == len("Tell me") + 1
    assert all(told["durations_ms"][phase] >= 0 for phase in ("admission", "queue", "prefill", "decode", "total"))
    shown = stack.command("explain", answer.id).stdout
    assert "InferenceCompleted" in shown
    assert "Decisions of admission" in shown


def test_tail_decodes_and_survives_junk(stack: RunningStack) -> None:
    answer = ask(stack, "tailed")
    stack.ended(answer.id.split("-", 1)[1])
    lines = stack.command(
        "topics", "tail", "lifecycle", "--from", "beginning", "--no-follow", "--json"
    ).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    assert any(r["event"].get("request_id") == answer.id.split("-", 1)[1] for r in records if "event" in r)
    assert "grant" not in json.dumps([r["headers"] for r in records])


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_socket_cancels_within_a_second_or_two(stack: RunningStack, stream: bool) -> None:
    body = {
        "model": MODEL,
        "stream": stream,
        "messages": [{"role": "user", "content": script(tokens=["x"], repeat=3000, token_ms=20)}],
    }
    before = _last_request(stack)
    with contextlib.suppress(httpx.ReadTimeout), stack.http() as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(6):
                    next(lines)
        else:
            client.post("/v1/chat/completions", json=body, timeout=1.5)
    closed_s = time.monotonic()
    request_id = stack.until(lambda: (found := _last_request(stack)) != before and found)
    timeline = stack.ended(request_id, wait_s=15)
    assert timeline.facts["outcome"] == "failed"
    assert timeline.facts["reason"] == "cancelled"
    assert time.monotonic() - closed_s < 12  # far less than the minute it would take
    made = timeline.tokens["completion"]
    assert made is not None
    assert made < 1000
    assert ask(stack, "next").choices[0].message.content == "next"


def _last_request(stack: RunningStack) -> str | None:
    """The request that came to the front door last."""
    done = stack.command("topics", "tail", "requests.interactive", "--from", "beginning", "--no-follow", "--json")
    asked = [json.loads(line) for line in done.stdout.splitlines()]
    ids = [r["event"]["request_id"] for r in asked if r.get("event", {}).get("type") == "InferenceRequested"]
    return max(ids, default=None)


def test_the_command_line_chats(stack: RunningStack) -> None:
    done = stack.command("chat", MODEL, "--message", "over the front door", "--key", stack.keys["acme"])
    assert done.stdout == "over the front door\n"
    assert "first token after" in done.stderr
    told = json.loads(stack.command("chat", MODEL, "--message", "again", "--key", stack.keys["acme"], "--json").stdout)
    assert told["text"] == "again"
    assert told["usage"]["completion_tokens"] == len("again") + 1


def test_the_command_line_converses(stack: RunningStack) -> None:
    done = stack.command("chat", MODEL, "--key", stack.keys["acme"], text="first\nsecond\n")
    assert done.stdout == "first\nsecond\n"


def test_metrics_and_readiness_of_every_process(stack: RunningStack) -> None:
    for port in stack.ops_ports.values():
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.get("/readyz").status_code == 200
            assert "headrace_" in client.get("/metrics").text


def test_a_worker_that_is_killed_is_started_again(stack: RunningStack) -> None:
    before = stack.pid("worker")
    stack.kill("worker")
    stack.until_restarted("worker", before)
    assert ask(stack, "still here").choices[0].message.content == "still here"


def test_commands_refuse_in_one_line(stack: RunningStack) -> None:
    for arguments in (
        ("explain", "nonsense"),
        ("explain", "0193b5c0-0000-7000-8000-000000000000"),
        ("topics", "tail", "nope"),
        ("tenants", "grant", "nobody"),
        ("models", "promote", "nobody", "1"),
        ("chat", "nobody", "--message", "x", "--key", stack.keys["acme"]),
        ("chat", "--message", "x", "--key", "hr-wrong"),
    ):
        done: subprocess.CompletedProcess[str] = stack.command(*arguments, check=False)
        assert done.returncode == 1, arguments
        assert done.stderr.startswith("headrace: "), arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr
