"""The file that says what runs on a data directory: `up.json`, held by a lock for as long as its supervisor lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from schemas.errors import HeadraceError
from schemas.reasons import Reason

LEFTOVERS_WAIT_S = 5.0
"""How long the children of a supervisor that was killed may take to follow it."""
START_TOLERANCE_S = 1.0


class AlreadyRunning(HeadraceError):
    """An earlier run still holds the data directory, or has left processes behind.

    Attributes:
        pids: the processes to stop, the supervisor's alone if it lives.
    """

    def __init__(self, message: str, pids: list[int]) -> None:
        super().__init__(Reason.CONFLICT, message)
        self.pids = pids


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process beyond doubt: pids are reused, but not with the same start.

    Attributes:
        name: what it is called, such as `bridge`.
        pid: its process id, also its process group's.
        started_at_s: when it started, in seconds since 1970.
    """

    name: str
    pid: int
    started_at_s: float

    @staticmethod
    def of(name: str, pid: int) -> ProcessId:
        """The id of a process that runs now; started_at_s is 0 if it has just ended."""
        try:
            return ProcessId(name, pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return ProcessId(name, pid, 0.0)

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie doesn't)."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at_s) < START_TOLERANCE_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class UpFile:
    """Claims a data directory for one supervisor and records its children."""

    def __init__(self, data_dir: Path) -> None:
        """Takes the data directory, which need not exist yet."""
        self._path = data_dir / "up.json"
        self._lock_path = data_dir / "up.lock"
        self._lock: IO[str] | None = None

    def claim(self) -> list[str]:
        """Takes the directory. Returns the names of what a dead earlier run had left in the file.

        Raises AlreadyRunning, whose message names the processes and how to stop them.
        """
        if self._lock is not None:
            return []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_path.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise self._running() from None
        supervisor, children = self._read()
        try:
            self._await_leftovers(supervisor, children)
        except AlreadyRunning:
            lock.close()
            raise
        self._lock = lock
        return [child.name for child in children]

    def write(self, children: list[ProcessId]) -> None:
        """Replaces the file by these children and this process as their supervisor."""
        state = {
            "supervisor": asdict(ProcessId.of("supervisor", os.getpid())),
            "children": [asdict(child) for child in children],
        }
        temporary = self._path.with_suffix(".json.new")
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(self._path)

    def release(self) -> None:
        """Removes the file and gives the directory free."""
        if self._lock is not None:
            self._path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _read(self) -> tuple[ProcessId | None, list[ProcessId]]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._path.read_text())
            return ProcessId(**state["supervisor"]), [ProcessId(**child) for child in state["children"]]
        return None, []

    def _running(self) -> AlreadyRunning:
        supervisor, _ = self._read()
        where = self._path.parent
        if supervisor is None:
            return AlreadyRunning(
                f"another process is starting or stopping Headrace in {where}; try again in a moment", []
            )
        since_s = max(0, round(time.time() - supervisor.started_at_s))
        text = (
            f"Headrace already runs in {where}: pid {supervisor.pid}, for {since_s} s. "
            f"Stop it with `kill {supervisor.pid}`, or use another directory (HEADRACE_DATA)"
        )
        return AlreadyRunning(text, [supervisor.pid])

    def _await_leftovers(self, supervisor: ProcessId | None, children: list[ProcessId]) -> None:
        give_up_at = time.monotonic() + LEFTOVERS_WAIT_S
        while left := [child for child in children if child.alive()]:
            if time.monotonic() > give_up_at:
                names = ", ".join(f"{child.name} (pid {child.pid})" for child in left)
                pids = [child.pid for child in left]
                ended = f"pid {supervisor.pid}, which has ended" if supervisor else "which has ended"
                text = (
                    f"an earlier run in {self._path.parent} ({ended}) left running: {names}. "
                    f"Stop them with `kill -9 {' '.join(map(str, pids))}` and try again"
                )
                raise AlreadyRunning(text, pids)
            time.sleep(0.1)
