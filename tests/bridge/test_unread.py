"""An answer that is written whole, and a reader that doesn't take it: it is disconnected, and one that reads slowly is not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response

from bridge import servers
from bridge.servers import make_server

BODY = b"x" * 16 * 1024 * 1024
"""More than the kernel takes off the server's hands."""


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(servers, "STALL_S", 0.3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Response(BODY)(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    server: uvicorn.Server = make_server(app, 1024, 1.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
async def test_who_reads_nothing_is_disconnected(port: int, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
    await asyncio.sleep(1.5)
    got = 0
    with pytest.raises(ConnectionResetError):
        while chunk := await reader.read(65536):
            got += len(chunk)
        raise ConnectionResetError
    assert got < len(BODY)
    writer.close()


async def test_who_reads_slowly_gets_all_of_it(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    got = 0
    while got < len(BODY):
        chunk = await reader.read(1024 * 1024)
        assert chunk
        got += len(chunk)
        await asyncio.sleep(0.002)
    assert head.startswith(b"HTTP/1.1 200")
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
