"""What a child process prints: into a file of bounded size, line by line, under the child's name."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

LOG_MAX_BYTES = 32 * 1024 * 1024
"""A log file that has grown past this is renamed to `.1`, which replaces the one before."""
LINE_MAX_BYTES = 16 * 1024
"""A longer line is cut in pieces of this size."""
TAIL_LINES = 20
READ_BYTES = 64 * 1024

OnLine = Callable[[str, str], None]
"""Called with the child's name and one line, without its end."""


class ChildLog:
    """The log file of one child over all its restarts; each line starts with `name pid | `."""

    def __init__(self, path: Path, name: str, on_line: OnLine | None = None) -> None:
        """Opens nothing yet. `on_line` also gets each line, for a console."""
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._name = name
        self._on_line = on_line
        self._file: FileIO | None = None

    async def follow(self, reader: asyncio.StreamReader, pid: int) -> None:
        """Copies what the child prints until it closes its output."""
        prefix = f"{self._name} {pid} | ".encode()
        rest = b""
        try:
            while chunk := await reader.read(READ_BYTES):
                lines, rest = _split(rest + chunk)
                self._take(prefix, lines)
            if rest:
                self._take(prefix, [rest])
        finally:
            self._close()

    def _take(self, prefix: bytes, lines: list[bytes]) -> None:
        # Lines that a full disk doesn't take are lost: a child whose output nobody reads would soon hang in writing it.
        with contextlib.suppress(OSError):
            self._write(b"".join(prefix + line + b"\n" for line in lines))
        for line in lines:
            text = line.decode("utf-8", "replace")
            self.tail.append(text)
            if self._on_line is not None:
                with contextlib.suppress(Exception):  # A console that fails must not stop the child's output.
                    self._on_line(self._name, text)

    def _write(self, data: bytes) -> None:
        if self._file is not None and self._file.tell() > LOG_MAX_BYTES:
            self._close()
            self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self._file.write(data)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class OutputPipe:
    """A pipe for what a child prints. Its end isn't the child's own end, for what the child started may hold it open.

    Attributes:
        reader: what was printed.
        write_end: the file descriptor for the child; close it here once the child has it.
        transport: closes the reading end.
    """

    reader: asyncio.StreamReader
    write_end: int
    transport: asyncio.BaseTransport

    @staticmethod
    async def open() -> OutputPipe:
        """A new pipe, read in this event loop."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        return OutputPipe(reader, write_end, transport)


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Whole lines, and what is left of the last."""
    *lines, rest = data.split(b"\n")
    pieces = [
        line[at : at + LINE_MAX_BYTES].rstrip(b"\r")
        for line in lines
        for at in range(0, max(len(line), 1), LINE_MAX_BYTES)
    ]
    while len(rest) > LINE_MAX_BYTES:
        pieces.append(rest[:LINE_MAX_BYTES])
        rest = rest[LINE_MAX_BYTES:]
    return pieces, rest
