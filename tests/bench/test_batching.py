from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from types import SimpleNamespace

import aiohttp
import orjson
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench import batching
from bench.batching import (
    ALONE,
    CALLERS,
    FAR,
    PEER,
    RAMP_S,
    TOKENS_EACH,
    Pairs,
    _callers,
    _ended,
    _judge,
    _ours,
    _poster,
    _ready,
    _rows,
    _theirs,
    _tree,
    _Window,
)
from bench.stack import stopped
from decisions.signature import input_problem
from infra.ports import bind
from schemas.errors import HeadraceError
from schemas.events import InferenceFailed, InferenceRejected, TokensGenerated
from schemas.parts import Attempt, Tensor
from tests.bench.test_hops import new_request_id

FOUND: dict[tuple[str, str], Pairs] = {
    ("http", "minilm"): [(400.0, 480.0), (500.0, 520.0)],
    ("log", "minilm"): [(600.0, 480.0), (600.0, 520.0)],
    ("http", "unbatched"): [(300.0, 500.0)],
    ("log", "unbatched"): [(400.0, 500.0)],
    (FAR, "minilm"): [(700.0, 1_000.0)],
}


def test_each_way_has_a_row_with_and_without_batching() -> None:
    rows = _rows(FOUND)

    assert [(row.metric, row.at, row.ours, row.theirs, row.ratio, row.peer) for row in rows] == [
        ("requests_per_s", "http", 450.0, 500.0, 0.9, PEER),
        ("requests_per_s", "log", 600.0, 500.0, 1.2, PEER),
        ("requests_per_s", "http, max_batch_size 1", 300.0, 500.0, 0.6, PEER),
        ("requests_per_s", "log, max_batch_size 1", 400.0, 500.0, 0.8, PEER),
        ("requests_per_s", FAR, 700.0, 1_000.0, 0.7, ALONE),
    ]


def test_aims_are_judged_with_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    _judge({**FOUND, ("log", "minilm"): [(490.0, 500.0)]})

    http, log, far = capsys.readouterr().err.splitlines()
    assert "aim: http at 0.9" in http
    assert "met (0.90)" in http
    assert "aim: log at 1 " in log
    assert "missed (0.98)" in log
    assert f"aim: {FAR} at 1 of {ALONE}: missed (0.70)" in far


def test_both_are_asked_the_same_tokens() -> None:
    ours, theirs = orjson.loads(_ours(7))["inputs"], orjson.loads(_theirs(7))["inputs"]

    assert ours[0]["data"] == theirs[0]["data"]
    assert len(ours[0]["data"]) == TOKENS_EACH
    assert orjson.loads(_ours(8))["inputs"][0]["data"] != ours[0]["data"]
    assert ours[1]["data"] == [TOKENS_EACH]


async def test_so_many_callers_ask_again_and_again_until_the_window_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    open_ = most = 0
    now_s = 50.0
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def call(number: int) -> None:
        nonlocal open_, most, now_s
        open_ += 1
        most = max(most, open_)
        asked.append(number)
        await asyncio.sleep(0)
        now_s += RAMP_S / 100
        open_ -= 1

    load = _callers(call)
    rates = [await load(2.0), await load(2.0)]

    assert asked == list(range(len(asked)))
    assert most == CALLERS
    assert open_ == 0
    assert rates == pytest.approx([100 / RAMP_S] * 2, rel=0.02)


def test_what_ends_before_and_after_the_window_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 50.0
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: now_s))
    window = _Window(2.0)
    for after_s, over in ((0.0, False), (RAMP_S / 2, False), (RAMP_S + 1, False), (RAMP_S + 2.01, True)):
        now_s = 50.0 + after_s
        window.ended(10)
        assert window.over is over
    assert window.rate == 5.0


async def test_who_is_not_measured_stands_still_with_all_it_started() -> None:
    server = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60 & wait", start_new_session=True)
    try:
        while len(tree := _tree(server.pid)) < 2:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
        with pytest.raises(KeyError), stopped(tree):
            while {process.status() for process in tree} != {psutil.STATUS_STOPPED}:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
            raise KeyError
        while psutil.STATUS_STOPPED in {process.status() for process in tree}:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        await server.wait()


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
            await _callers(_poster(session, url, _ours, {}))(1.0)
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
