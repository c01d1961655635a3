"""Pings: answered, and not kept for a caller that sends them and reads nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from bridge.servers import WebSocket

HIGH_WATER_BYTES = 64 * 1024


class Wire:
    """A transport whose other end reads only when told."""

    def __init__(self) -> None:
        self.pending = b""
        self.taken = b""
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        self.pending += data
        if len(self.pending) > HIGH_WATER_BYTES:
            self.protocol.pause_writing()

    def read(self) -> bytes:
        data, self.pending = self.pending, b""
        self.protocol.resume_writing()
        return data

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def accepting(_scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await receive()


async def opened() -> tuple[Wire, ClientProtocol]:
    """An open socket, both ends."""
    config = uvicorn.Config(accepting, ws=WebSocket, lifespan="off", log_config=None)
    config.load()
    server, wire = WebSocket(config, uvicorn.Server(config).server_state, {}), Wire()
    wire.protocol = server
    server.connection_made(wire)  # type: ignore[arg-type]
    client = ClientProtocol(parse_uri("ws://x/"))
    client.send_request(client.connect())
    server.data_received(b"".join(client.data_to_send()))
    await asyncio.sleep(0.05)
    client.receive_data(wire.read())
    client.events_received()
    return wire, client


async def ping(wire: Wire, client: ClientProtocol, payload: bytes) -> None:
    client.send_ping(payload)
    wire.protocol.data_received(b"".join(client.data_to_send()))


def pongs(client: ClientProtocol, data: bytes) -> list[bytes]:
    client.receive_data(data)
    found = [event for event in client.events_received() if isinstance(event, Frame)]
    assert all(frame.opcode is Opcode.PONG for frame in found)
    return [bytes(frame.data) for frame in found]


async def test_each_ping_is_answered() -> None:
    wire, client = await opened()
    for i in range(3):
        await ping(wire, client, b"%d" % i)
    assert pongs(client, wire.read()) == [b"0", b"1", b"2"]
    wire.protocol.connection_lost(None)


async def test_pings_of_a_caller_that_does_not_read_take_no_memory() -> None:
    wire, client = await opened()
    for i in range(5_000):
        await ping(wire, client, b"%0100d" % i)
    assert len(wire.pending) < 2 * HIGH_WATER_BYTES
    last = b"%0100d" % 4_999
    assert last not in pongs(client, wire.read())
    assert pongs(client, wire.read()) == [last]
    wire.protocol.connection_lost(None)
