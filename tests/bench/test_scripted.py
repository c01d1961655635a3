from __future__ import annotations

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import scripted
from schemas.errors import HeadraceError

SCRIPT: dict[str, object] = {"tokens": ["x"]}


def test_an_answer_may_be_as_long_as_the_context_takes() -> None:
    asked = orjson.loads(scripted.body(SCRIPT))
    assert asked["stream"] is True
    assert len(asked["prompt"]) + asked["max_tokens"] == scripted.CONTEXT


@pytest.mark.parametrize("texts", [["", "x", "x"], [""]])
async def test_a_stream_has_begun_with_its_first_text(texts: list[str]) -> None:
    lines = [b"data: " + orjson.dumps({"choices": [{"text": text}]}) + b"\n\n" for text in texts]

    async def completions(request: web.Request) -> web.Response:
        assert orjson.loads(await request.read()) == orjson.loads(scripted.body(SCRIPT))
        return web.Response(body=b"".join(lines))

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        if "x" not in texts:
            with pytest.raises(HeadraceError, match="before it had begun"):
                await scripted.opened(session, url, SCRIPT)
            return
        answer = await scripted.opened(session, url, SCRIPT)
        assert (await answer.content.readline(), await answer.content.readline()) == (b"\n", lines[-1][:-1])
        await scripted.read_to_end(answer)
        assert answer.content.at_eof()
