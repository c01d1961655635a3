"""`headrace` that is sent a signal at a moment of a batch job: `python -m tests.cli.batch_crash SIGNAL POINT COUNT batch run …`.

The signal comes when the point is passed for the COUNT-th time. SIGKILL leaves the files as they are then; SIGINT is what Ctrl-C sends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from cli.batch_files import JobFiles, new_of
from cli.batch_run import Runner
from cli.main import main
from infra.log import EventProducer

POINTS = ("begun", "reading", "reserved", "asked", "confirmed", "heard", "torn", "unnoted", "noted")
"""The job is noted and nothing asked; it goes on, and reads what was answered meanwhile; it noted what it may ask; a request was handed over; the
log has one; an answer came; half of an answer's output is in the file; the output is whole, and half of the job file beside it; that is noted, too.
"""


class Crash:
    """Sends the signal to this process, once."""

    def __init__(self, number: signal.Signals, point: str, count: int) -> None:
        self._number, self._point, self._left = number, point, count

    def passing(self, point: str) -> bool:
        """The point is passed; whether it is time."""
        if point == self._point:
            self._left -= 1
        return point == self._point and self._left == 0

    def at(self, point: str) -> None:
        """The point is passed."""
        if self.passing(point):
            self.now()

    def now(self) -> None:
        """The signal."""
        os.kill(os.getpid(), self._number)


def _around(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _watch(crash: Crash) -> None:
    """Puts the points into the job's code."""

    def begin(plain: Any) -> Any:
        async def missing(self: Runner, units: Any) -> Any:
            found = await plain(self, units)
            crash.at("begun")
            if found:
                crash.at("reading")
            return found

        return missing

    def reserve(plain: Any) -> Any:
        def reserved(*arguments: Any) -> None:
            plain(*arguments)
            crash.at("reserved")

        return reserved

    def send(plain: Any) -> Any:
        async def sent(*arguments: Any, **options: Any) -> Any:
            future = await plain(*arguments, **options)
            crash.at("asked")
            future.add_done_callback(lambda _: crash.at("confirmed"))
            return future

        return sent

    def hear(plain: Any) -> Any:
        async def heard(*arguments: Any) -> None:
            crash.at("heard")
            await plain(*arguments)

        return heard

    def write(plain: Any) -> Any:
        def written(self: JobFiles, lines: bytes, job: Any) -> None:
            if not crash.passing("torn"):
                plain(self, lines, job)
                return
            half = len(lines) // 2
            plain(self, lines[:half], job)
            assert self._file is not None
            self._file.flush()
            crash.now()
            plain(self, lines[half:], job)

        return written

    def save(plain: Any) -> Any:
        def saved(self: JobFiles, job: Any) -> None:
            if crash.passing("unnoted"):
                assert self._file is not None
                self._file.flush()
                new_of(self.path).write_text(json.dumps(job.to_json())[:40])
                crash.now()
            plain(self, job)
            crash.at("noted")

        return saved

    _around(Runner, "_missing", begin)
    _around(Runner, "_reserve", reserve)
    _around(Runner, "_on_record", hear)
    _around(EventProducer, "send", send)
    _around(JobFiles, "write", write)
    _around(JobFiles, "save", save)


if __name__ == "__main__":
    _watch(Crash(signal.Signals[sys.argv.pop(1)], sys.argv.pop(1), int(sys.argv.pop(1))))
    main()
