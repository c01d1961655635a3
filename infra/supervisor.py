"""Starts, watches, restarts and stops the processes of one machine.

Owns the child processes of `headrace up`, their logs in `<data_dir>/logs/` and the state file `<data_dir>/up.json`. Each
child leads its own process group, so that stopping it stops what it started, and a Ctrl-C on the terminal reaches only the
supervisor, which then stops them in order. Runs in one event loop, two tasks a child. Must be driven from the process's
main thread: the kernel ties a child's life to the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

import httpx
import structlog

from infra import launch, ports
from infra.child_log import ChildLog, OnLine, OutputPipe
from infra.up_file import ProcessId, UpFile
from schemas.errors import HeadraceError
from schemas.reasons import Reason

RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0
RESTARTS_MAX = 8
"""After this many crashes in a row a child is given up."""
START_CRASHES_MAX = 2
"""`ready` gives up on a child that has crashed this often in a row; its restarts go on."""
STABLE_S = 60.0
"""A child that has run this long has its crashes forgotten."""
STOP_GRACE_S = 15.0
OUTPUT_WAIT_S = 2.0
"""How long the rest of an ended child's output is read; a process that left its group may hold the pipe for longer."""
READY_POLL_S = 0.1
READY_HTTP_TIMEOUT_S = 2.0
_LAUNCHER = (sys.executable, "-I", "-S", str(Path(launch.__file__).resolve()))

log = structlog.get_logger("supervisor")


class ChildFailed(HeadraceError):
    """A child could not be started, didn't become ready in time, or was given up."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


class ChildState(Enum):
    """Where a child stands."""

    RUNNING = "running"
    WAITING = "waiting to restart"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run.

    Attributes:
        name: unique among the children, also the log file's name.
        argv: the program and its arguments.
        env: added to the supervisor's own environment.
        ops_port: where the child serves /readyz; None if it serves none and counts as ready once started.
        restart: whether to start it again when it ends by itself.
        stage: `stop_all` stops the children of the highest stage first, those of one stage at once.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ops_port: int | None = None
    restart: bool = True
    stage: int = 1


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """One child as it stands: its state, pid (None if not running), restarts so far, last exit status, uptime, log."""

    name: str
    state: ChildState
    pid: int | None
    restarts: int
    exit_status: int | None
    uptime_s: float
    log: Path


class _Child:
    """One child process over all its restarts."""

    def __init__(self, spec: ChildSpec, child_log: ChildLog) -> None:
        self.spec = spec
        self.log = child_log
        self.state = ChildState.STOPPED
        self.process: asyncio.subprocess.Process | None = None
        self.output: OutputPipe | None = None
        self.started_at_s = 0.0
        self.restarts = 0
        self.crashes_in_a_row = 0
        self.exit_status: int | None = None
        self.stopping = asyncio.Event()
        self.watcher: asyncio.Task[None] | None = None

    def status(self) -> ChildStatus:
        running = self.state is ChildState.RUNNING and self.process is not None
        return ChildStatus(
            name=self.spec.name,
            state=self.state,
            pid=self.process.pid if running and self.process else None,
            restarts=self.restarts,
            exit_status=self.exit_status,
            uptime_s=time.monotonic() - self.started_at_s if running else 0.0,
            log=self.log.path,
        )


class Supervisor:
    """The children of one data directory; at most one supervisor a directory lives at a time."""

    def __init__(self, data_dir: Path, on_line: OnLine | None = None) -> None:
        """Starts nothing. `on_line(name, line)` is called with what the children print."""
        self._data_dir = data_dir
        self._on_line = on_line
        self._up_file = UpFile(data_dir)
        self._children: dict[str, _Child] = {}
        self._adopted: dict[str, ProcessId] = {}
        self._guard: asyncio.subprocess.Process | None = None

    def claim(self) -> list[str]:
        """Takes the data directory; `start` does so too. Returns the names that a dead earlier run left in its file.

        Raises AlreadyRunning, which names the processes of an earlier run that still live and how to stop them.
        """
        left = self._up_file.claim()
        if left:
            log.info("an earlier run ended without cleaning up", children=left)
        return left

    async def start(self, spec: ChildSpec) -> None:
        """Starts a child; returns once it runs, which is not yet ready.

        Raises ChildFailed if a child of that name runs or the program can't be started, PortInUse if its port is taken.
        """
        self.claim()
        present = self._children.get(spec.name)
        if present is not None and present.state in (ChildState.RUNNING, ChildState.WAITING):
            raise ChildFailed(f"{spec.name} already runs")
        if spec.ops_port:
            ports.require_free(spec.ops_port, purpose=f"{spec.name}, metrics and health")
        child_log = ChildLog(self._data_dir / "logs" / f"{spec.name}.log", spec.name, self._on_line)
        child = _Child(spec, child_log)
        self._children[spec.name] = child
        await self._spawn(child)
        child.watcher = asyncio.create_task(self._watch(child), name=f"watch {spec.name}")

    async def adopt(self, name: str, pid: int) -> None:
        """Records a process that something else started and stops, so that it is killed if this process is."""
        self.claim()
        self._adopted[name] = ProcessId.of(name, pid)
        await self._guarded("+", pid)
        self._write_state()

    async def release(self, name: str) -> None:
        """Forgets an adopted process, which has been stopped."""
        adopted = self._adopted.pop(name, None)
        if adopted is not None:
            await self._guarded("-", adopted.pid)
            self._write_state()

    async def ready(self, name: str, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> None:
        """Waits until the child's /readyz answers 200. Raises ChildFailed with its last words if it doesn't come to that.

        `on_wait` is told at each look what is still missing; what it raises ends the wait.
        """
        child = self._child(name)
        give_up_at = time.monotonic() + timeout_s
        objection = "it has not answered yet"
        async with httpx.AsyncClient(trust_env=False, timeout=READY_HTTP_TIMEOUT_S) as client:
            while True:
                if child.state in (ChildState.FAILED, ChildState.STOPPED):
                    raise ChildFailed(f"{name} ended with status {child.exit_status}{_last_words(child)}")
                if not child.spec.ops_port:
                    return
                if child.crashes_in_a_row >= START_CRASHES_MAX:
                    raise ChildFailed(
                        f"{name} crashed {child.crashes_in_a_row} times, last with status {child.exit_status}{_last_words(child)}"
                    )
                if child.state is ChildState.RUNNING:
                    try:
                        answer = await client.get(f"http://127.0.0.1:{child.spec.ops_port}/readyz")
                    except httpx.HTTPError:
                        pass
                    else:
                        if answer.status_code == 200:
                            return
                        objection = answer.text.strip()
                if on_wait is not None:
                    on_wait(objection)
                if time.monotonic() > give_up_at:
                    raise ChildFailed(f"{name} is not ready after {timeout_s:.0f} s: {objection}{_last_words(child)}")
                await asyncio.sleep(READY_POLL_S)

    async def stop(self, name: str, grace_s: float = STOP_GRACE_S) -> None:
        """Stops a child, then what it started: SIGTERM to it alone, so that it can end in good order; SIGKILL to all after grace_s.

        Does nothing if it doesn't run.
        """
        child = self._child(name)
        child.stopping.set()
        if child.state is ChildState.RUNNING and child.process is not None:
            _signal(child.process.pid, signal.SIGTERM)
        if child.watcher is not None:
            try:
                await asyncio.wait_for(asyncio.shield(child.watcher), grace_s)
            except TimeoutError:
                log.warning("killed: it did not stop in time", child=name, grace_s=grace_s)
                if child.process is not None:
                    _signal_group(child.process.pid, signal.SIGKILL)
                await child.watcher
        child.state = ChildState.STOPPED

    async def stop_all(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops every child, the highest stage first, and gives the data directory free."""
        stages = sorted({child.spec.stage for child in self._children.values()}, reverse=True)
        for stage in stages:
            names = [name for name, child in self._children.items() if child.spec.stage == stage]
            await asyncio.gather(*(self.stop(name, grace_s) for name in reversed(names)))
        if self._guard is not None and not self._adopted:
            await self._stop_guard()
        if not self._adopted:
            self._up_file.release()

    def status(self) -> list[ChildStatus]:
        """Every child ever started, in that order."""
        return [child.status() for child in self._children.values()]

    async def __aenter__(self) -> Self:
        self.claim()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.stop_all()

    def _child(self, name: str) -> _Child:
        try:
            return self._children[name]
        except KeyError:
            raise ChildFailed(f"no child is called {name}") from None

    async def _spawn(self, child: _Child) -> None:
        spec = child.spec
        pipe = await OutputPipe.open()
        try:
            child.process = await asyncio.create_subprocess_exec(
                *_LAUNCHER,
                "exec",
                str(os.getpid()),
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe.write_end,
                stderr=asyncio.subprocess.STDOUT,
                env={"PYTHONUNBUFFERED": "1", **os.environ, **spec.env},
                start_new_session=True,
            )
        except OSError as error:
            child.state = ChildState.FAILED
            pipe.transport.close()
            raise ChildFailed(f"{spec.name} can't be started: {error.strerror}") from error
        finally:
            os.close(pipe.write_end)
        child.output = pipe
        child.state = ChildState.RUNNING
        child.started_at_s = time.monotonic()
        await self._guarded("+", child.process.pid)
        self._write_state()
        log.debug("started", child=spec.name, pid=child.process.pid)

    async def _watch(self, child: _Child) -> None:
        """Sees a child to its end, again and again while it is to be restarted."""
        while True:
            await self._see_out(child)
            ran_s = time.monotonic() - child.started_at_s
            if child.stopping.is_set() or not child.spec.restart:
                child.state = ChildState.STOPPED
                return
            child.crashes_in_a_row = 1 if ran_s >= STABLE_S else child.crashes_in_a_row + 1
            if child.crashes_in_a_row > RESTARTS_MAX or child.exit_status == launch.NO_SUCH_COMMAND:
                child.state = ChildState.FAILED
                log.error(
                    "given up", child=child.spec.name, exit_status=child.exit_status, crashes=child.crashes_in_a_row
                )
                return
            wait_s = min(RESTART_FIRST_S * 2 ** (child.crashes_in_a_row - 1), RESTART_MAX_S)
            log.warning("ended by itself", child=child.spec.name, exit_status=child.exit_status, restart_in_s=wait_s)
            child.state = ChildState.WAITING
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), wait_s)
            if child.stopping.is_set():
                child.state = ChildState.STOPPED
                return
            child.restarts += 1
            try:
                await self._spawn(child)
            except ChildFailed as error:
                log.error("given up", child=child.spec.name, message=error.message)
                return
            if child.stopping.is_set() and child.process is not None:
                _signal(child.process.pid, signal.SIGTERM)

    async def _see_out(self, child: _Child) -> None:
        """Waits for the end of a child's process; what it started ends with it."""
        process, output = child.process, child.output
        assert process is not None and output is not None
        reading = asyncio.create_task(child.log.follow(output.reader, process.pid))
        child.exit_status = await process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        await asyncio.wait({reading}, timeout=OUTPUT_WAIT_S)
        output.transport.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await self._guarded("-", process.pid)
        child.state = ChildState.WAITING
        self._write_state()

    async def _guarded(self, sign: str, group: int) -> None:
        if self._guard is None:
            self._guard = await asyncio.create_subprocess_exec(
                *_LAUNCHER,
                "guard",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._guard.stdin.write(f"{sign}{group}\n".encode())
            await self._guard.stdin.drain()
            if self._guard.stdin.is_closing():  # it was killed; asyncio prints a traceback where nobody asks
                await self._guard.stdin.wait_closed()

    async def _stop_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            await guard.wait()

    def _write_state(self) -> None:
        running = [
            ProcessId.of(name, child.process.pid)
            for name, child in self._children.items()
            if child.state is ChildState.RUNNING and child.process is not None
        ]
        try:
            self._up_file.write([*self._adopted.values(), *running])
        except OSError as error:  # a full disk must not end the watch over the children
            log.warning("can't write down what runs", error=str(error))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _last_words(child: _Child) -> str:
    words = "".join(f"\n  {line}" for line in child.log.tail)
    return f"; its log is {child.log.path}" + (f", which ends:{words}" if words else "")
