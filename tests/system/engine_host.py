"""A worker as `headrace worker` runs it, whose engine may also be asked over a socket: the engine's contract then needs no second boot.

`python -m tests.system.engine_host SOCKET worker MODEL VERSION` runs one; `RemoteEngine(SOCKET)` asks its engine, from another process.
A frame is a pickle behind its length. One connection carries one call; closing it closes the engine's iterator.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import workers.main
from schemas.events import ModelVersionRegistered
from workers.engines.choice import make_engine
from workers.engines.port import Engine, EngineChunk, EngineError, EngineRequest, EngineStats

LENGTH_BYTES = 8


def _frame(what: object) -> bytes:
    data = pickle.dumps(what)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def _read(reader: asyncio.StreamReader) -> Any:
    return pickle.loads(await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")))


# --- in the worker -----------------------------------------------------------------------------------------------------


async def _answer(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one call. What the caller no longer wants, for it hung up, is cancelled."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        name, argument = await _read(reader)
        call = asyncio.ensure_future(_call(engine, name, argument, writer))
        gone = asyncio.ensure_future(reader.read())
        await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (call, gone):
            task.cancel()
        await asyncio.gather(call, gone, return_exceptions=True)
    writer.close()


async def _call(engine: Engine, name: str, argument: Any, writer: asyncio.StreamWriter) -> None:
    try:
        if name == "generate":
            async with aclosing(engine.generate(argument)) as chunks:
                async for chunk in chunks:
                    writer.write(_frame(chunk))
        elif name == "abort":
            await engine.abort(argument)
        elif name == "facts":
            writer.write(_frame((engine.vocab_size, engine.context_length)))
        else:
            writer.write(_frame(engine.stats()))
        writer.write(_frame(None))
    except EngineError as error:
        writer.write(_frame(error.message))
    await writer.drain()


def _hosted(path: Path) -> Any:
    """As `make_engine`, and what it makes listens on a socket once it has started."""

    def make(version: ModelVersionRegistered, slots: int) -> Engine:
        engine: Any = make_engine(version, slots)
        start = engine.start

        async def start_and_listen() -> None:
            await start()
            path.unlink(missing_ok=True)
            engine.server = await asyncio.start_unix_server(lambda *ends: _answer(engine, *ends), path)

        engine.start = start_and_listen
        made: Engine = engine
        return made

    return make


# --- outside -----------------------------------------------------------------------------------------------------------


class RemoteEngine:
    """The engine of a worker that runs elsewhere. Its worker loads it and shuts it down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.vocab_size, self.context_length = self._ask("facts")

    async def start(self) -> None:
        """The worker has."""

    async def shutdown(self) -> None:
        """The worker will."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """Chunks as they come."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(_frame(("generate", request)))
            while (told := await _read(reader)) is not None:
                if isinstance(told, str):
                    raise EngineError(told)
                yield told
        finally:
            writer.close()
            await writer.wait_closed()

    async def abort(self, key: str) -> None:
        """Returns once it is done."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        writer.write(_frame(("abort", key)))
        assert await _read(reader) is None
        writer.close()
        await writer.wait_closed()

    def stats(self) -> EngineStats:
        """As of now."""
        stats: EngineStats = self._ask("stats")
        return stats

    def _ask(self, name: str) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._path))
            connection.sendall(_frame((name, None)))
            with connection.makefile("rb") as file:
                return pickle.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "big")))


if __name__ == "__main__":
    from cli.main import main

    vars(workers.main)["make_engine"] = _hosted(Path(sys.argv.pop(1)))
    main()
