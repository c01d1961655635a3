"""The process: what it serves beside the API, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from pathlib import Path

import httpx
import pytest

from bridge import door
from bridge.main import run
from bridge.openapi import document
from infra import ports
from infra.broker import EmbeddedKafka
from infra.settings import BridgeSettings, KafkaSettings
from infra.topics import ensure_core
from schemas.errors import HeadraceError
from tests.bridge.conftest import RunningBridge, start_bridge
from tests.bridge.test_cancel import newest
from tests.bridge.test_openai_chat import body, script


async def test_the_docs_page_needs_nothing_from_elsewhere(bridge: RunningBridge) -> None:
    async with httpx.AsyncClient(base_url=bridge.url) as client:
        page = await client.get("/docs")
        assert page.status_code == 200
        assert (await client.get("/", follow_redirects=True)).text == page.text
        links = re.findall(r'(?:src|href|url)[=:] ?"([^"]+)"', page.text)
        assert len(links) == 4
        for link in links:
            assert link.startswith("/")
            assert (await client.get(link)).status_code == 200
        assert (await client.get("/openapi.json")).json() == json.loads(json.dumps(document()))


def test_the_document_names_every_path_and_resolves_every_reference() -> None:
    text = json.dumps(document())
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/streams/{stream}", "/v1/models", "/v1/models/{model}"}
    paths |= {"/v1/embeddings", "/v1/classifications"}
    inference = {path for path in document()["paths"] if path.startswith("/v2")}
    assert set(document()["paths"]) - inference == paths
    assert {"/v2", "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"} <= inference
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document()["components"]["schemas"]
    chat = document()["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert {"messages", "max_completion_tokens", "logprobs", "tools"} <= set(chat["properties"])


async def test_health_and_metrics(bridge: RunningBridge) -> None:
    async with bridge.client() as client:
        streamed = await client.post("/v1/chat/completions", json=body(messages=script(tokens=["a", "b"], gap_ms=50)))
        assert streamed.status_code == 200
        assert (await client.get("/livez")).status_code == (await client.get("/readyz")).status_code == 200
        assert (await client.get("/metrics")).status_code == 404
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{bridge.settings.ops_port}") as client:
        metrics = (await client.get("/metrics")).text
        assert (await client.get("/readyz")).status_code == 200
    labels = r'\{model="bridge-model",.*tier="interactive",version="v1"\}'
    for name in ("ttft_seconds_count", "itl_seconds_count"):
        assert re.search(rf"headrace_{name}{labels} [1-9]", metrics), name
    assert re.search(r'headrace_requests_total\{model="bridge-model",outcome="completed".*\} [1-9]', metrics)


async def test_a_stop_lets_calls_end_leaves_streams_to_be_resumed_and_frees_the_port(bridge: RunningBridge) -> None:
    settings = dataclasses.replace(
        bridge.settings, port=ports.free_port(), grpc_port=0, ops_port=0, instance="bridge-stopping", drain_ms=1_500
    )
    loop = asyncio.get_running_loop()
    other, thread = await loop.run_in_executor(None, start_bridge, settings)
    async with other.client() as client:
        short = asyncio.create_task(
            client.post("/v1/chat/completions", json=body(messages=script(mark="short", tokens=["a", "b"], gap_ms=300)))
        )
        hanging = {"tokens": ["a"], "hang": True}
        stream = asyncio.create_task(
            client.post("/v1/chat/completions", json=body(messages=script(mark="long-stream", **hanging)))
        )
        whole = asyncio.create_task(
            client.post("/v1/chat/completions", json=body(messages=script(mark="long-whole", **hanging), stream=False))
        )
        await other.until(
            lambda: all(newest(other, mark) is not None for mark in ("short", "long-stream", "long-whole"))
        )
        await asyncio.sleep(0.1)
        other.loop.call_soon_threadsafe(other.stop.set)
        assert "[DONE]" in (await short).text
        with pytest.raises(httpx.TransportError):
            await stream
        assert (await whole).status_code == 503
    await loop.run_in_executor(None, thread.join, 30)
    assert not thread.is_alive()
    await bridge.until(lambda: newest(bridge, "long-whole") in bridge.responder.cancelled)
    assert newest(bridge, "long-stream") not in bridge.responder.cancelled
    ports.require_free(settings.port)


async def test_a_port_in_use_is_named(bridge: RunningBridge) -> None:
    settings = dataclasses.replace(bridge.settings, grpc_port=0, ops_port=0)
    with pytest.raises(HeadraceError, match=str(bridge.settings.port)):
        await run(settings, asyncio.Event())


async def test_without_a_broker_it_waits_says_so_and_takes_no_connection() -> None:
    kafka = KafkaSettings(f"127.0.0.1:{ports.free_port()}")
    settings = BridgeSettings(kafka=kafka, port=ports.free_port(), ops_port=ports.free_port(), grant_secret=b"x" * 32)
    stop = asyncio.Event()
    running = asyncio.create_task(run(settings, stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.ops_port}", trust_env=False) as client:
        said = ""
        while kafka.bootstrap not in said:
            await asyncio.sleep(0.05)
            with contextlib.suppress(httpx.ConnectError):
                said = (await client.get("/readyz")).text
        assert "can't be reached" in said
        assert (await client.get("/livez")).status_code == 200
    ports.require_free(settings.port)
    stop.set()
    await asyncio.wait_for(running, 10)


async def test_a_broker_that_dies_is_told_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    broker = EmbeddedKafka(tmp_path / "kafka")
    await loop.run_in_executor(None, broker.start)
    try:
        await ensure_core(broker.settings)
        settings = BridgeSettings(kafka=broker.settings, port=ports.free_port(), grant_secret=b"x" * 32, drain_ms=1000)
        bridge, thread = await loop.run_in_executor(None, start_bridge, settings)
        async with bridge.client() as client:
            assert (await client.post("/v1/chat/completions", json=body(stream=False))).status_code == 200
            await loop.run_in_executor(None, broker.kill)
            for stream in (False, True):
                response = await client.post("/v1/chat/completions", json=body(stream=stream))
                assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
                assert "retry-after" in response.headers
            monkeypatch.setattr(door, "PRODUCE_WAIT_S", 600.0)
            response = await client.post(
                "/v1/chat/completions", json=body(stream=False), headers={"X-Headrace-Timeout-Ms": "300"}
            )
            assert response.status_code == 503
            assert (await client.get("/livez")).status_code == 200
        bridge.loop.call_soon_threadsafe(bridge.stop.set)
        await loop.run_in_executor(None, thread.join, 60)
        assert not thread.is_alive()
    finally:
        await loop.run_in_executor(None, broker.stop)
