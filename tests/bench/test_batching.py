from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator

import aiohttp
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench import batching
from bench.batching import CALLERS, PEER, TOKENS_EACH, _ended, _judge, _ours, _poster, _rate, _ready, _rows, _theirs
from decisions.signature import input_problem
from infra.ports import bind
from schemas.errors import HeadraceError
from schemas.events import InferenceFailed, InferenceRejected, TokensGenerated
from schemas.parts import Attempt, Tensor
from tests.bench.test_hops import new_request_id

FOUND = {
    ("http", "minilm"): 450.0,
    ("log", "minilm"): 600.0,
    ("http", "unbatched"): 300.0,
    ("log", "unbatched"): 400.0,
}


def test_each_way_has_a_row_with_and_without_batching() -> None:
    rows = _rows(FOUND, 500.0)

    assert [(row.metric, row.at, row.ours, row.theirs, row.ratio, row.peer) for row in rows] == [
        ("requests_per_s", "http", 450.0, 500.0, 0.9, PEER),
        ("requests_per_s", "log", 600.0, 500.0, 1.2, PEER),
        ("requests_per_s", "http, max_batch_size 1", 300.0, 500.0, 0.6, PEER),
        ("requests_per_s", "log, max_batch_size 1", 400.0, 500.0, 0.8, PEER),
    ]


def test_aims_are_judged_with_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    _judge({**FOUND, ("log", "minilm"): 490.0}, 500.0)

    http, log = capsys.readouterr().err.splitlines()
    assert "aim: http at 0.9" in http
    assert "met (0.90)" in http
    assert "aim: log at 1 " in log
    assert "missed (0.98)" in log


def test_both_are_asked_the_same_tokens() -> None:
    ours, theirs = orjson.loads(_ours(7))["inputs"], orjson.loads(_theirs(7))["inputs"]

    assert ours[0]["data"] == theirs[0]["data"]
    assert len(ours[0]["data"]) == TOKENS_EACH
    assert orjson.loads(_ours(8))["inputs"][0]["data"] != ours[0]["data"]
    assert ours[1]["data"] == [TOKENS_EACH]


async def test_so_many_callers_ask_again_and_again_after_a_warm_up() -> None:
    asked: list[int] = []
    open_ = most = 0

    async def call(number: int) -> None:
        nonlocal open_, most
        open_ += 1
        most = max(most, open_)
        asked.append(number)
        await asyncio.sleep(0.001)
        open_ -= 1

    rate = await _rate(call, 300)

    warm_up = batching.WARM_UP * 300 // batching.CALLS
    assert sorted(asked) == sorted([*range(warm_up), *range(300)])
    assert most == min(CALLERS, 300)
    assert rate > 0


@contextlib.asynccontextmanager
async def served(status: int) -> AsyncIterator[str]:
    async def answer(request: Request) -> Response:
        return JSONResponse({"authorization": request.headers.get("authorization")}, status_code=status)

    app = Starlette(routes=[Route("/{rest:path}", answer, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with bind(0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_a_call_that_fails_ends_the_run() -> None:
    async with served(503) as url, aiohttp.ClientSession() as session:
        with pytest.raises(HeadraceError, match="a call failed: 503"):
            await _rate(_poster(session, url, _ours, {}), 20)
    async with served(200) as url, aiohttp.ClientSession() as session:
        await _poster(session, url, _ours, {"Authorization": "Bearer k"})(1)


def test_a_request_in_the_log_ends_well_or_the_run_ends() -> None:
    name = new_request_id()

    assert not _ended(TokensGenerated(name, 0, Attempt(1, 1), 0, (1,), "a"))
    with pytest.raises(HeadraceError, match="a request failed: no room"):
        _ended(InferenceRejected(name, "bench", "minilm", "interactive", "overloaded", "no room"))
    with pytest.raises(HeadraceError, match="a request failed: broke"):
        _ended(InferenceFailed(name, "bench", "minilm", "1", "interactive", "engine_error", "broke"))


async def test_a_peer_that_does_not_come_up_is_told_with_its_last_words() -> None:
    with tempfile.TemporaryFile() as log:
        server = await asyncio.create_subprocess_exec(
            "sh", "-c", "echo one; echo no shared library; exit 3", stdout=log
        )
        with pytest.raises(HeadraceError, match="Triton, didn't come up: no shared library"):
            await server.wait()
            await _ready(server, "http://127.0.0.1:9/", log)


async def test_a_peer_that_is_up_is_ready() -> None:
    with tempfile.TemporaryFile() as log:
        server = await asyncio.create_subprocess_exec("sleep", "60", stdout=log)
        try:
            async with served(200) as url:
                await _ready(server, url, log)
        finally:
            server.kill()
            await server.wait()


def test_what_is_asked_is_what_minilm_takes() -> None:
    ids, lengths = (
        Tensor(each["name"], each["datatype"], tuple(each["shape"]), bytes(4 * len(each["data"])))
        for each in orjson.loads(_ours(0))["inputs"]
    )

    assert input_problem((ids, lengths), (), {}) is None
