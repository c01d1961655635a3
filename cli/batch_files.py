"""A batch job's files: its input, read line by line and checked; its output; and the job file beside it, from which it goes on.

The output is written first and the job file after it, as one: a job that was killed cuts from its output what the job file doesn't tell of.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from cli.batch_lines import Asking, Line, read_line, repeats_text
from decisions.job_again import among
from decisions.jobs import Job, Numbers
from schemas.errors import HeadraceError
from schemas.reasons import Reason

LINE_BYTES_MAX = 32 * 1024 * 1024
BAD_SHOWN_MAX = 20
READ_BYTES = 1024 * 1024
PAUSE_LINES = 1_000
"""After so many lines others have their turn: a signal, above all."""


class Digest(Protocol):
    """Is fed all that is read, such as `hashlib.sha256()`."""

    def update(self, data: bytes, /) -> None:
        """So much more."""


def raw_lines(path: Path, digest: Digest | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines that aren't blank, numbered from 1. Raises HeadraceError (payload_too_large) for one that is longer than any request."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            if digest is not None:
                digest.update(raw)
            if len(raw) > LINE_BYTES_MAX:
                raise HeadraceError(
                    Reason.PAYLOAD_TOO_LARGE, f"{path}: line {number} has more than {LINE_BYTES_MAX} bytes"
                )
            if not raw.isspace():
                yield number, raw


def read_lines(path: Path, asking: Asking, digest: Digest | None = None, only: Numbers | None = None) -> Iterator[Line]:
    """The lines, or those with these numbers `only`, understood."""
    return (
        read_line(raw, number, asking) for number, raw in raw_lines(path, digest) if only is None or among(number, only)
    )


@dataclass(slots=True)
class Checked:
    """What a look at the whole input found: its digest and lines, and the first of the bad ones, of which there are `bad` in all.

    `repeats` tells of lines whose id an earlier line has which that is.
    """

    digest: str = ""
    lines: int = 0
    bad: int = 0
    shown: list[tuple[int, str]] = field(default_factory=list)
    repeats: dict[int, int] = field(default_factory=dict)

    def tell(self, number: int, text: str) -> None:
        """A line is bad."""
        self.bad += 1
        if len(self.shown) < BAD_SHOWN_MAX:
            self.shown.append((number, text))


def digest_of(path: Path) -> str:
    """The input's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def check(path: Path, asking: Asking, seen: Callable[[int], None] = lambda _lines: None) -> Checked:
    """Reads the whole input and understands each line; `seen` is told how many, now and then, and others have their turn then. Holds 8 bytes a line."""
    checked, digest = Checked(), hashlib.sha256()
    ids = array("Q")
    for line in read_lines(path, asking, digest):
        checked.lines += 1
        ids.append(_short(line.custom_id))
        if line.fault is not None:
            checked.tell(line.number, line.fault.message)
        if checked.lines % PAUSE_LINES == 0:
            seen(checked.lines)
            await asyncio.sleep(0)
    checked.digest = digest.hexdigest()
    if twice := _repeated(ids):
        await _tell_repeated(path, asking, twice, checked)
    checked.shown.sort()
    return checked


def _short(custom_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "big")


def _repeated(ids: array[int]) -> set[int]:
    import numpy as np

    values = np.sort(np.frombuffer(ids, np.uint64)) if ids else np.zeros(0, np.uint64)
    return {int(value) for value in values[1:][values[1:] == values[:-1]]}


async def _tell_repeated(path: Path, asking: Asking, twice: set[int], checked: Checked) -> None:
    first: dict[str, int] = {}
    for count, line in enumerate(read_lines(path, asking)):
        if count % PAUSE_LINES == 0:
            await asyncio.sleep(0)
        if _short(line.custom_id) not in twice or line.fault is not None:
            continue
        before = first.setdefault(line.custom_id, line.number)
        if before != line.number:
            checked.repeats[line.number] = before
            checked.tell(line.number, repeats_text(line.custom_id, before))


def check_files(source: Path, out: Path) -> None:
    """Raises HeadraceError: invalid_request if one is no file, such as a pipe or a device: the input is read twice, and the output cut when the
    job goes on; conflict if the input is one of the files that the job writes: it would be lost.
    """
    for path, why in ((source, "its lines are read twice"), (out, "a job that goes on cuts it")):
        if path.exists() and not path.is_file():
            raise HeadraceError(Reason.INVALID_REQUEST, f"{path} is a pipe or a device; name a file, since {why}")
    job = JobFiles(out).path
    for path in (out, job, new_of(job), rewritten_of(job)):
        if path.exists() and path.samefile(source):
            text = f"{path} is the input itself, and the job would write over it; name another output"
            raise HeadraceError(Reason.CONFLICT, text)


def new_of(path: Path) -> Path:
    """Where a job file is written before it takes the other's place."""
    return path.with_name(f"{path.name}.new")


def rewritten_of(path: Path) -> Path:
    """Where, beside a job file, an output is written anew before it takes the other's place."""
    return path.with_name(f"{path.name}.out")


def _crc32(file: BinaryIO, size: int) -> int:
    """Of a file's beginning."""
    file.seek(0)
    found = 0
    while size > 0 and (data := file.read(min(READ_BYTES, size))):
        found, size = zlib.crc32(data, found), size - len(data)
    return found


class JobFiles:
    """The output and the job file; one process at a time has them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out.with_name(f"{out.name}.job")
        self._file: BinaryIO | None = None

    def load(self) -> Job | None:
        """The job that was begun, or None. Raises HeadraceError if its file can't be read, or there is an output without one."""
        try:
            kept = self.path.read_bytes()
        except FileNotFoundError:
            if self.out.exists() and self.out.stat().st_size:
                raise HeadraceError(
                    Reason.CONFLICT, f"{self.out} exists, and isn't a job's that can go on; name another, or say --new"
                ) from None
            return None
        try:
            return Job.from_json(json.loads(kept))
        except ValueError as error:
            text = f"{self.path} is no job file ({error}); remove it and {self.out}, or say --new, to begin anew"
            raise HeadraceError(Reason.CONFLICT, text) from None

    def open(self) -> None:
        """Take the files. Raises HeadraceError (conflict) if another process has them."""
        while self._file is None or not self._in_place:  # who had it may have removed it just now
            self.close()
            self._file = os.fdopen(os.open(self.out, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.close()
                raise HeadraceError(Reason.CONFLICT, f"another process works on {self.out}") from None

    @property
    def _in_place(self) -> bool:
        """Whether the output is still what stands under its name."""
        assert self._file is not None, "the files aren't open"
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.out.stat())
        except FileNotFoundError:
            return False

    def begin(self, job: Job | None) -> None:
        """Cut the output to what a job that goes on has told of, or (None) empty it; what follows on a job that is finished is another's, and stays.

        Raises HeadraceError (conflict) if it is shorter, or was changed.
        """
        assert self._file is not None, "the files aren't open"
        size = 0 if job is None else job.out_bytes
        if job is not None:
            self._end_rewriting(job)
        if self._file.seek(0, os.SEEK_END) < size:
            raise HeadraceError(
                Reason.CONFLICT, f"{self.out} is shorter than its job file says; say --new to begin anew"
            )
        if job is not None and _crc32(self._file, size) != job.out_crc32:
            text = f"{self.out} isn't what the job wrote any more; put that back to go on, or say --new to begin anew"
            raise HeadraceError(Reason.CONFLICT, text)
        if job is None:
            self.path.unlink(missing_ok=True)
            rewritten_of(self.path).unlink(missing_ok=True)
        elif job.finished:
            return
        self._file.truncate(size)
        self._file.seek(size)

    def lines(self, job: Job) -> Iterator[bytes]:
        """Those of the output."""
        left = job.out_bytes
        with self.out.open("rb") as file:
            while left > 0 and (line := file.readline(left)):
                left -= len(line)
                yield line

    def is_whole(self, job: Job) -> bool:
        """Whether nothing follows in the output on what the job wrote."""
        assert self._file is not None, "the files aren't open"
        return self._file.seek(0, os.SEEK_END) == job.out_bytes

    def rewrite(self, job: Job, lines: Iterable[bytes]) -> None:
        """These lines as the output, with `job` beside it. Whoever goes on after a kill finds the one or the other. Raises as `save`."""
        size = crc32 = 0
        try:
            with rewritten_of(self.path).open("wb") as file:
                for line in lines:
                    file.write(line)
                    size, crc32 = size + len(line), zlib.crc32(line, crc32)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self.refusing(error) from error
        job.out_bytes, job.out_crc32 = size, crc32
        self.save(job)
        self._put_in_place()

    def _end_rewriting(self, job: Job) -> None:
        """The job file tells of an output that hadn't taken its place yet."""
        new = rewritten_of(self.path)
        if not new.exists():
            return
        with new.open("rb") as file:
            told = file.seek(0, os.SEEK_END) == job.out_bytes and _crc32(file, job.out_bytes) == job.out_crc32
        if told:
            self._put_in_place()
        else:
            new.unlink()

    def _put_in_place(self) -> None:
        rewritten_of(self.path).replace(self.out)
        self.open()
        assert self._file is not None, "the files aren't open"
        self._file.seek(0, os.SEEK_END)

    def write(self, lines: bytes, job: Job) -> None:
        """Add to the output."""
        assert self._file is not None, "the files aren't open"
        self._file.write(lines)
        job.out_bytes += len(lines)
        job.out_crc32 = zlib.crc32(lines, job.out_crc32)

    def save(self, job: Job) -> None:
        """All that was added is kept, and then that it is. Raises HeadraceError: unavailable if the disk doesn't take it; conflict if the output is elsewhere."""
        assert self._file is not None, "the files aren't open"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            if not self._in_place:
                text = f"{self.out} was moved or removed meanwhile; put it back to go on, or say --new to begin anew"
                raise HeadraceError(Reason.CONFLICT, text)
            new = new_of(self.path)
            with new.open("w") as file:
                json.dump(job.to_json(), file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            raise self.refusing(error) from error

    def refusing(self, error: OSError) -> HeadraceError:
        """What is told when they take nothing more, as of a disk that is full."""
        text = f"{self.out} can't be written: {error}; once it can, run the same again to go on"
        return HeadraceError(Reason.UNAVAILABLE, text)

    def close(self) -> None:
        """Let go of the files. What was added and not saved may be lost: the job file doesn't tell of it."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # of what is still to be written: it isn't told over the error that ended the job
                file.close()
