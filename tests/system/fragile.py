"""A stack whose broker, and all else, may be hurt: two of every process, on a broker of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from infra import ports
from infra.broker import EmbeddedKafka
from infra.models_file import ModelEntry
from infra.settings import grant_secret
from infra.supervisor import RESTART_MAX_S
from tests.system.chaos_plan import ADMISSIONS, BRIDGES, CLOCKS, ENDINGS, WORKERS, Act, Step
from tests.system.running import READY_WAIT_S, RunningStack

CHAOS = "chaos"
SLOTS = 64
SESSION_MS = 6_000
"""The shortest session that the broker allows."""
DRAIN_MS = 500
"""Shorter than an answer, so that a worker that stops hands answers over."""
POISON_ATTEMPTS = 1_000
"""More workers are killed here than one bad request would kill."""
RUNS_AGAIN_S = RESTART_MAX_S + 15.0
"""What is killed again and again is started again after `RESTART_MAX_S` at last."""
OPS_WAIT_S = 2.0
LINES, LINE_CHARS = 12, 300
"""Of a log, where a test failed."""

_SESSIONS = {
    f"HEADRACE_{process}_SESSION_TIMEOUT_MS": str(SESSION_MS)
    for process in ("WORKER", "ADMISSION", "ENDINGS", "LIFECYCLE")
}


class Fragile:
    """`stack` with `broker`: two front doors, two admissions, two endings, one clock and one worker of the model `chaos`."""

    def __init__(self, broker: EmbeddedKafka, data_dir: Path, slots: int = SLOTS) -> None:
        """Nothing runs but the broker, which is asked for nothing yet."""
        self.broker = broker
        self.stack = RunningStack(broker.settings, data_dir)
        self.entry = ModelEntry(CHAOS, "1", "scripted", "scripted", 4096, slots=slots)
        self.doors = dict(zip(BRIDGES, (self.stack.port, ports.free_port()), strict=True))
        self._beside = ThreadPoolExecutor(1)
        self._under_way: list[Future[None]] = []
        grant_secret(data_dir)

    def prepare(self) -> None:
        """Makes topics, tenants and the model."""
        self.stack.thread.run(self.stack._prepare(self.entry))

    def start(self) -> None:
        """Starts everything but the other workers; `await_ready` then waits for it."""
        for name in ADMISSIONS:
            self.stack.add(name, "streams", "admission", "--tier", "interactive", **_SESSIONS)
        for name in ENDINGS:
            self.stack.add(name, "streams", "endings", **_SESSIONS)
        for name in CLOCKS:
            self.stack.add(name, "streams", "lifecycle", **_SESSIONS)
        for name, port in self.doors.items():
            self.stack.add(name, "bridge", "--port", str(port), HEADRACE_BRIDGE_INSTANCE=name)
        self.start_worker(WORKERS[0])

    def start_worker(self, name: str) -> None:
        """Starts one more worker."""
        env = {
            "HEADRACE_WORKER_DRAIN_MS": str(DRAIN_MS),
            "HEADRACE_WORKER_POISON_ATTEMPTS_MAX": str(POISON_ATTEMPTS),
            "HEADRACE_WORKER_WORKER_ID": name,
        }
        self.stack.add(name, "worker", CHAOS, "1", **_SESSIONS, **env)

    def await_ready(self, wait_s: float = READY_WAIT_S) -> None:
        """Returns when everything that should run is ready, however often it was killed."""
        for name in self.stack.ops_ports:
            self.stack.await_ready(name, wait_s)

    def urls(self) -> list[str]:
        """The front doors."""
        return [f"http://127.0.0.1:{port}" for port in self.doors.values()]

    def health(self, name: str, what: str) -> tuple[int, str]:
        """What a process says at `/livez` or `/readyz`."""
        with httpx.Client(trust_env=False, timeout=OPS_WAIT_S) as http:
            answer = http.get(f"http://127.0.0.1:{self.stack.ops_ports[name]}/{what}")
        return answer.status_code, answer.text.strip()

    def says(self, name: str, what: str) -> int:
        """The status alone; 0 if nobody answers, since the process is being started again."""
        try:
            return self.health(name, what)[0]
        except httpx.TransportError:
            return 0

    def until_says(self, name: str, what: str, status: int, wait_s: float) -> None:
        """Returns once a process answers with this status."""
        self.stack.until(lambda: self.says(name, what) == status, wait_s)

    def tell(self) -> str:
        """What each process says of itself, and said last, for whoever reads why a test failed."""
        told = []
        for name in self.stack.ops_ports:
            with suppress(httpx.HTTPError):
                told.append(f"{name}: {self.health(name, 'readyz')}")
            log = self.stack.data_dir / "logs" / f"{name}.log"
            told += [f"    {line[:LINE_CHARS]}" for line in log.read_text(errors="replace").splitlines()[-LINES:]]
        return "\n".join(told)

    def do(self, step: Step) -> None:
        """Does one step of a plan, or begins what takes time. A process that is being started again is waited for."""
        stack, name = self.stack, step.target
        match step.act:
            case Act.START:
                self.start_worker(name)
            case Act.STOP:
                stopping = asyncio.run_coroutine_threadsafe(stack.supervisor.stop(name), stack.thread.loop)
                self._under_way.append(stopping)
                del stack._specs[name], stack.ops_ports[name]
            case Act.KILL:
                stack.until(lambda: self._signalled(name, signal.SIGKILL), RUNS_AGAIN_S)
            case Act.FREEZE:
                stack.until(lambda: self._signalled(name, signal.SIGSTOP), RUNS_AGAIN_S)
            case Act.WAKE:
                self._signalled(name, signal.SIGCONT)
            case Act.RESTART:
                self._under_way.append(self._beside.submit(self.broker.restart))
            case Act.CRASH:
                self._under_way.append(self._beside.submit(self._crash))

    def _signalled(self, name: str, number: signal.Signals) -> bool:
        """Whether there was a process to signal; one that has just ended is no more than one that isn't there."""
        with suppress(ProcessLookupError):
            if self.stack.pid(name) is not None:
                self.stack._signal(name, number)
                return True
        return False

    def _crash(self) -> None:
        self.broker.kill()
        self.broker.start()

    def settle(self) -> None:
        """Returns when all that takes time is done: the broker runs again, and workers have stopped."""
        for one in self._under_way:
            one.result(READY_WAIT_S)

    def close(self) -> None:
        """Stops everything but the broker."""
        self._beside.shutdown()
        self.stack.close()


@contextmanager
def running(data_dir: Path, slots: int = SLOTS) -> Iterator[Fragile]:
    """Everything, ready, on a new broker."""
    with EmbeddedKafka(data_dir / "kafka") as broker:
        fragile = Fragile(broker, data_dir / "stack", slots)
        try:
            fragile.prepare()
            fragile.start()
            fragile.await_ready()
            yield fragile
        finally:
            fragile.close()
