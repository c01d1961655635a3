"""A proxy between a client and an HTTP server that spoils what the server answers: cuts it, fills a range with zeros, flips a byte; or is away."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable

SPOILT_BYTES_MIN = 1_000
"""Smaller bodies, such as errors and listings, go through whole."""
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

Fault = Callable[[bytes], bytes]


def cut(body: bytes) -> bytes:
    """The connection ends at half."""
    return body[: len(body) // 2]


def zero_fill(body: bytes) -> bytes:
    """A range is zeros, such as a file system leaves after a crash."""
    third = len(body) // 3
    return body[:third] + bytes(third) + body[2 * third :]


def flip(body: bytes) -> bytes:
    """One bit of one byte is another."""
    middle = len(body) // 2
    return body[:middle] + bytes((body[middle] ^ 1,)) + body[middle + 1 :]


FAULTS = (cut, zero_fill, flip)


class FaultyProxy:
    """Listens from `start` to `stop`. `faults` are applied to the next large bodies, one each; without them `always`, if there is one, to all."""

    def __init__(self, port: int, upstream: int) -> None:
        self.port = port
        self._upstream = upstream
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        self.bodies = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Nobody answers any more, and what is open breaks off."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            asking = asyncio.create_task(_pump(reader, upstream_writer))
            try:
                while await self._answer(upstream_reader, writer):
                    pass
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                upstream_writer.close()
        writer.close()

    async def _answer(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Passes one response on; whether more may come on this connection."""
        head = await upstream.readuntil(b"\r\n\r\n")
        found = _LENGTH.search(head)
        body = await upstream.readexactly(int(found[1])) if found else b""
        spoilt = body
        if len(body) >= SPOILT_BYTES_MIN:
            self.bodies += 1
            if self.faults:
                spoilt = self.faults.popleft()(body)
            elif self.always is not None:
                spoilt = self.always(body)
        writer.write(head + spoilt)
        await writer.drain()
        return len(spoilt) == len(body)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
