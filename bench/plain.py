"""The peer of `takeover`: one process, one engine, HTTP, and nothing behind it. `python -m bench.plain PORT DRAIN_S`.

It serves the scripted engine as a model server without a log does: what it was answering when it ends is lost, and its caller, who
sees the connection break, asks another replica again from the beginning. On SIGTERM it gives open answers DRAIN_S seconds.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from schemas.events import Sampling
from workers.engines.port import EngineConfig, EngineRequest
from workers.engines.scripted import EOS, ScriptedEngine

CONTEXT = 8192
SLOTS = 64


def app() -> Starlette:
    """The routes: streamed chats, and readiness."""
    engine = ScriptedEngine(EngineConfig("plain", "scripted", CONTEXT, SLOTS))

    async def chat(request: Request) -> Response:
        prompt = (await request.json())["messages"][-1]["content"].encode()
        return StreamingResponse(_events(engine, tuple(prompt)), media_type="text/event-stream")

    async def ready(_: Request) -> Response:
        return PlainTextResponse("ready")

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.shutdown()

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/readyz", ready)]
    return Starlette(routes=routes, lifespan=running)


async def _events(engine: ScriptedEngine, prompt: tuple[int, ...]) -> AsyncIterator[bytes]:
    name, made, finished = str(uuid.uuid4()), 0, False
    async with aclosing(engine.generate(EngineRequest(name, prompt, Sampling()))) as chunks:
        async for chunk in chunks:
            made, finished = made + len(chunk.token_ids), chunk.finished
            text = bytes(token for token in chunk.token_ids if token < EOS).decode()
            yield _event({"id": name, "choices": [{"index": 0, "delta": {"content": text}}]})
    if not finished:  # the engine was told to end, and the caller must know
        return
    yield _event({"id": name, "choices": [], "usage": {"completion_tokens": made}})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def main(port: int, drain_s: int) -> None:
    """Serves until a signal ends it."""
    uvicorn.run(app(), host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=drain_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
