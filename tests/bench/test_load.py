from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.load import Client, Sample, closed_loop, percentile, pooled
from infra.ports import bind
from schemas.errors import HeadraceError

FIRST_S, TOKEN_S = 0.05, 0.02


class Endpoint:
    """Answers as its body's `how` says, and counts the calls open at once."""

    def __init__(self) -> None:
        self.open = self.most_open = 0

    async def __call__(self, request: Request) -> Response:
        how = (await request.json())["how"]
        if how == "refuse":
            return JSONResponse({"error": {"message": "no"}}, status_code=429)
        return StreamingResponse(self.stream(how), media_type="text/event-stream")

    async def stream(self, how: str) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield event({"id": "chatcmpl-1", "choices": [{"delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(FIRST_S)
            for text in ("a", "b€", "c"):
                whole = event({"id": "chatcmpl-1", "choices": [{"delta": {"content": text}}]})
                yield whole[:20]
                await asyncio.sleep(TOKEN_S / 2)
                yield whole[20:]
                await asyncio.sleep(TOKEN_S / 2)
            if how == "cut":
                return
            if how == "fail":
                yield event({"error": {"message": "engine_error"}})
                return
            yield b": keep-alive\n\n" + event({"id": "chatcmpl-1", "choices": [], "usage": {"completion_tokens": 3}})
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1


def event(data: dict[str, object]) -> bytes:
    return b"id: x:1:2\ndata: " + orjson.dumps(data) + b"\n\n"


@contextlib.asynccontextmanager
async def served(endpoint: Endpoint) -> AsyncIterator[Client]:
    async def root(request: Request) -> Response:
        return await endpoint(request)

    app = Starlette(routes=[Route("/v1/chat/completions", root, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with bind(0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with Client(url, "a key") as client:
                yield client
        finally:
            server.should_exit = True
            await task


def body(how: str) -> bytes:
    return orjson.dumps({"how": how})


async def test_a_call_is_timed_from_its_first_text_to_its_last() -> None:
    async with served(Endpoint()) as client:
        sample = await client.call(body("answer"))

    assert sample.error is None
    assert sample.tokens == 3
    assert sample.request_id == "chatcmpl-1"
    assert sample.ttft_ms >= FIRST_S * 1000  # the role's event, which came before, doesn't count
    assert sample.itl_ms is not None
    assert sample.itl_ms >= TOKEN_S * 1000 * 0.9


@pytest.mark.parametrize(("how", "said"), [("refuse", "429"), ("cut", "DONE"), ("fail", "engine_error")])
async def test_what_goes_wrong_is_in_the_sample(how: str, said: str) -> None:
    async with served(Endpoint()) as client:
        result = await closed_loop(client, 2, 2, lambda _: body(how))

    assert all(said in error for error in result.errors)
    assert len(result.errors) == 2
    with pytest.raises(HeadraceError, match="2 of 2 calls failed"):
        result.require_good()


async def test_a_closed_loop_keeps_so_many_calls_open() -> None:
    endpoint = Endpoint()
    numbers: list[int] = []

    def next_body(number: int) -> bytes:
        numbers.append(number)
        return body("answer")

    async with served(endpoint) as client:
        result = (await closed_loop(client, 4, 10, next_body)).require_good()

    assert endpoint.most_open == 4
    assert sorted(numbers) == list(range(10))
    assert result.tokens_per_s == pytest.approx(30 / result.wall_s)
    both = pooled([result, result])
    assert len(both.good) == 20
    assert both.tokens_per_s == pytest.approx(result.tokens_per_s)


def test_percentiles_are_interpolated() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([5], 0.99) == 5
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_an_answer_of_one_token_has_no_latency_between_tokens() -> None:
    assert Sample(1.0, first_s=2.0, last_s=2.0, tokens=1).itl_ms is None
