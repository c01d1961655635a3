"""Bodies: their size, and text that is none."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bridge.body import parse_object
from infra.objects import DEFAULT_FOLDER
from schemas.errors import HeadraceError
from schemas.topics import INLINE_MAX_BYTES, REQUEST_MAX_BYTES
from tests.bridge.conftest import MODEL, TENANT, RunningBridge
from tests.bridge.test_openai_chat import script

CHAT = "/v1/chat/completions"


def sized(size: int) -> bytes:
    """A chat of exactly so many bytes."""
    empty = {"model": MODEL, "messages": [{"role": "system", "content": ""}, *script(tokens=["y"])]}
    filler = size - len(json.dumps(empty))
    return json.dumps(
        {**empty, "messages": [{"role": "system", "content": "x" * filler}, *script(tokens=["y"])]}
    ).encode()


def payloads_of(bridge: RunningBridge) -> set[Path]:
    """What is in the object store."""
    return {path for path in (bridge.settings.data_dir / DEFAULT_FOLDER).rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [INLINE_MAX_BYTES // 2, INLINE_MAX_BYTES - 1_000, 2 * INLINE_MAX_BYTES])
async def test_what_is_too_large_for_a_record_is_stored_under_its_tenant(bridge: RunningBridge, size: int) -> None:
    before = payloads_of(bridge)
    async with bridge.client() as client:
        assert (await client.post(CHAT, content=sized(size))).status_code == 200
    new = payloads_of(bridge) - before
    assert len(new) == (1 if size > INLINE_MAX_BYTES else 0)
    assert all(path.parent == bridge.settings.data_dir / DEFAULT_FOLDER / "payloads" / TENANT for path in new)
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in new)


async def test_large_token_ids_are_taken(bridge: RunningBridge) -> None:
    """One prompt of ids that is too many for a record, beside one that is not."""
    directions = list(json.dumps({"tokens": ["y"]}).encode())
    async with bridge.client() as client:
        for ids in ([*directions, *[32] * 250_000], directions):
            response = await client.post("/v1/completions", json={"model": MODEL, "prompt": ids})
            assert response.status_code == 200, response.text


async def test_others_are_served_while_a_large_body_is_taken(bridge: RunningBridge) -> None:
    """Megabytes of small numbers take long to parse."""
    directions = list(json.dumps({"tokens": ["y"]}).encode())
    raw = json.dumps({"model": MODEL, "prompt": [*directions, *[32] * 2_000_000]}).encode()
    async with bridge.client() as client:
        large = asyncio.create_task(client.post("/v1/completions", content=raw))
        served = 0
        while not large.done():
            assert (await client.get("/v1/models")).status_code == 200
            served += 1
        assert (await large).status_code == 200
    assert served > 10


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("size", "status"),
    [(REQUEST_MAX_BYTES - 1, 200), (REQUEST_MAX_BYTES, 200), (REQUEST_MAX_BYTES + 1, 413), (12 * 1024 * 1024, 413)],
)
async def test_a_body_is_taken_up_to_its_limit(bridge: RunningBridge, size: int, status: int, chunked: bool) -> None:
    raw = sized(size)
    assert len(raw) == size

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, size, 65536):
            yield raw[start : start + 65536]

    before, stored = len(bridge.responder.seen), payloads_of(bridge)
    async with bridge.client() as client:
        response = await client.post(CHAT, content=chunks() if chunked else raw)
        assert response.status_code == status, response.text
        if status == 413:
            assert response.json()["error"]["code"] == "payload_too_large"
            assert len(bridge.responder.seen) == before
            assert payloads_of(bridge) == stored
        assert (await client.post(CHAT, content=sized(1000))).status_code == 200


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "a\\udc00b"}]}', "messages[0].content"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud83d"}]}]}',
            "messages[0].content[0].text",
        ),
        (b'{"model": "m", "messages": [], "user": "\\ud800"}', "user"),
        (b'{"model": "m", "stop": ["a", "\\udfff"]}', "stop[1]"),
        (b'{"model": "m", "user": "\xff"}', "user"),
        (b'{"model": "m", "user": "\xed\xa0\x80"}', "user"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xc3"}]}', "messages[0].content"),
    ],
)
async def test_what_is_no_text_is_refused_by_its_place(bridge: RunningBridge, raw: bytes, param: str) -> None:
    before = len(bridge.responder.seen)
    async with bridge.client() as client:
        response = await client.post(CHAT, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(bridge.responder.seen) == before


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": 1',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"\\ud800": 1}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(HeadraceError) as caught:
        parse_object(raw)
    assert caught.value.reason.http_status == 400


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud83d\\ude00", "\x7f", "\u0000"])
def test_text_is_taken(text: str) -> None:
    raw = '{"a": "' + text.replace("\u0000", "\\u0000") + '"}'
    expected: Any = json.loads(raw)
    assert parse_object(raw.encode()) == expected


@pytest.mark.parametrize("line", [b"X-A: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
async def test_a_head_without_end_is_refused(bridge: RunningBridge, line: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bridge.settings.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nX-B: ")
    with contextlib.suppress(OSError):
        for _ in range(300):
            writer.write(line)
            await writer.drain()
    with contextlib.suppress(OSError):
        answer = await reader.read()
        assert not answer or answer.startswith(b"HTTP/1.1 400")
    writer.close()
    async with bridge.client() as client:
        assert (await client.post(CHAT, content=sized(1000))).status_code == 200
