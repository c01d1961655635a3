"""Streams at a front door, for benchmarks in which one is ended from outside, and what the scripted engine is asked there."""

from __future__ import annotations

import re

import aiohttp
import orjson

from schemas.errors import HeadraceError
from schemas.reasons import Reason

MODEL, CONTEXT = "scripted", 8192
_TEXT = re.compile(rb'"text": ?"[^"]')


def body(script: dict[str, object]) -> bytes:
    """A streamed call's. Its answer may be as long as the context takes."""
    prompt = orjson.dumps(script).decode()
    return orjson.dumps({"model": MODEL, "stream": True, "prompt": prompt, "max_tokens": CONTEXT - len(prompt)})


async def opened(session: aiohttp.ClientSession, url: str, script: dict[str, object]) -> aiohttp.ClientResponse:
    """`begun` of a script."""
    return await begun(session, url, body(script))


async def begun(session: aiohttp.ClientSession, url: str, asked: bytes) -> aiohttp.ClientResponse:
    """A stream of completions that has begun: its first text has come. Raises HeadraceError if it ends before."""
    answer = await session.post(f"{url}/v1/completions", data=asked)
    while not _TEXT.search(line := await answer.content.readline()):
        if not line:
            raise HeadraceError(Reason.UNAVAILABLE, f"a stream ended with {answer.status} before it had begun")
    return answer


async def read_to_end(answer: aiohttp.ClientResponse) -> None:
    """Returns when a stream is over."""
    while await answer.content.readline():
        pass
