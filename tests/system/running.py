"""The whole path as real processes on a broker of its own, and handles to hurt them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import AsyncOpenAI, OpenAI

from cli.history import history
from cli.models import register_versions
from cli.records import Read
from cli.registry import DEFAULT_TIERS, add_key, ensure_all, new_key, new_tenant, now_ms, write_tenant
from cli.timeline import Timeline, build
from infra import ports
from infra.directory import WorkerDirectory
from infra.models_file import ModelEntry
from infra.settings import KafkaSettings, grant_secret
from infra.supervisor import ChildSpec, Supervisor
from schemas.events import WorkerReported

ROOT = Path(__file__).resolve().parents[2]
MODEL = "scripted"
TENANTS = ("acme", "other")
READY_WAIT_S = 120.0
CALL_WAIT_S = 60.0
COMMAND_WAIT_S = 60.0
LOOK_PAUSE_S_MAX = 0.5
T = TypeVar("T")


class LoopThread:
    """An event loop that lives as long as the tests: the kernel ties child processes to the thread that started them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="system-stack", daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T], wait_s: float = READY_WAIT_S) -> T:
        """The result of a coroutine, from another thread."""

        async def body() -> T:
            return await work

        future: Future[T] = asyncio.run_coroutine_threadsafe(body(), self.loop)
        return future.result(wait_s)

    def close(self) -> None:
        """Ends the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass
class RunningStack:
    """Two admissions, endings, lifecycle, one bridge, one worker of the scripted engine; tenants `acme` and `other`.

    Attributes:
        keys: each tenant's API key.
        supervisor: restarts what is killed.
        ops_ports: where each process serves its metrics, by name.
        context_length: the model's, in bytes.
        extra_env: what else its processes are told.
    """

    kafka: KafkaSettings
    data_dir: Path
    keys: dict[str, str] = field(default_factory=dict)
    ops_ports: dict[str, int] = field(default_factory=dict)
    context_length: int = 4096
    extra_env: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=ports.free_port)
    thread: LoopThread = field(default_factory=LoopThread)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.data_dir)
        self._specs: dict[str, ChildSpec] = {}
        self._clients: list[
            OpenAI | httpx.Client
        ] = []  # closed at the end: a socket that is collected open is a warning

    @property
    def base_url(self) -> str:
        """The front door."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """What a process or command of this stack needs in its environment."""
        return {
            **self.kafka.to_env(),
            "HEADRACE_DATA": str(self.data_dir),
            "HEADRACE_URL": self.base_url,
            **self.extra_env,
        }

    # --- starting and stopping ----------------------------------------------------------------------------------------

    def start(self, slots: int = 8) -> None:
        """Prepares the log and starts everything; returns when all of it is ready. `slots` are the worker's."""
        entry = ModelEntry(MODEL, "1", "scripted", "scripted", self.context_length, slots=slots)
        grant_secret(self.data_dir)
        self.thread.run(self._prepare(entry))
        self.add("worker", "worker", MODEL, "1")
        self.add("admission-interactive", "streams", "admission", "--tier", "interactive")
        self.add("admission-batch", "streams", "admission", "--tier", "batch")
        self.add("endings", "streams", "endings")
        self.add("lifecycle", "streams", "lifecycle")
        self.add("bridge", "bridge", "--port", str(self.port))
        for name in self._specs:
            self.await_ready(name)

    async def _prepare(self, entry: ModelEntry) -> None:
        await ensure_all(self.kafka)
        await register_versions(self.kafka, [entry.registered(None, now_ms())])
        for name in TENANTS:
            self.keys[name], kept = new_key(DEFAULT_TIERS, now_ms())
            await write_tenant(self.kafka, add_key(new_tenant(name, now_ms()), kept))

    def add(self, name: str, *arguments: str, program: Sequence[str] = ("cli.main",), **env: str) -> None:
        """Starts one more process: `headrace` with these arguments, or another module that takes them."""
        port = ports.free_port()
        self.ops_ports[name] = port
        argv = (sys.executable, "-m", *program, *arguments)
        spec = ChildSpec(name, argv, {**self.env, "HEADRACE_OPS_PORT": str(port), **env}, port)
        self._specs[name] = spec
        self.thread.run(self.supervisor.start(spec))

    def await_ready(self, name: str, wait_s: float = READY_WAIT_S) -> None:
        """Returns when the process says that it is ready, however often it was killed: the supervisor would take that for crashes."""
        self.until(lambda: self._says_ready(name), wait_s)

    def _says_ready(self, name: str) -> bool:
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.ops_ports[name]}/readyz", timeout=5, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def stop(self, name: str) -> None:
        """Stops one process in an orderly way; it isn't restarted."""
        self.thread.run(self.supervisor.stop(name))

    def remove(self, name: str) -> None:
        """Stops one process for good."""
        self.stop(name)
        del self.ops_ports[name], self._specs[name]

    def restart(self, name: str) -> None:
        """Stops one process in an orderly way and starts it again."""
        self.stop(name)
        self.thread.run(self.supervisor.start(self._specs[name]))
        self.await_ready(name)

    def kill_all(self) -> None:
        """kill -9 of every process at once; starts them anew and returns when all are ready. None counts as a crash."""
        for name in self._specs:
            self.kill(name)
        for name in self._specs:
            self.stop(name)
        for spec in self._specs.values():
            self.thread.run(self.supervisor.start(spec))
        for name in self._specs:
            self.await_ready(name)

    def close(self) -> None:
        """Stops everything."""
        for client in self._clients:
            client.close()
        self.thread.run(self.supervisor.stop_all())
        self.thread.close()

    def reports(self, model: str) -> list[WorkerReported]:
        """What the workers of a model last told of themselves, the newest last."""

        async def look() -> list[WorkerReported]:
            directory = WorkerDirectory(self.kafka)
            await directory.start()
            try:
                return [seen.report for seen in sorted(directory.serving(model, "1"), key=lambda seen: seen.seen_ms)]
            finally:
                await directory.stop()

        return self.thread.run(look())

    # --- hurting ------------------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int | None:
        """The process as it runs now."""
        return next(status.pid for status in self.supervisor.status() if status.name == name)

    def kill(self, name: str) -> None:
        """kill -9 of a process and all it started; the supervisor starts it again."""
        self._signal(name, signal.SIGKILL)

    def pause(self, name: str) -> None:
        """Freezes a process: its sockets stay open and nothing answers."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Lets a frozen process go on."""
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self.pid(name)
        assert pid is not None, f"{name} doesn't run"
        os.killpg(pid, number)

    def until_restarted(self, name: str, before: int | None, wait_s: float = READY_WAIT_S) -> None:
        """Returns when a process that was killed runs again, and is ready."""
        self.until(lambda: self.pid(name) not in (None, before))
        self.await_ready(name, wait_s)

    @staticmethod
    def until(condition: Callable[[], Any], wait_s: float = CALL_WAIT_S) -> Any:
        """What the condition gives once it is true. A look that takes long, as one into the log does, is repeated after as long a pause."""
        end_s = time.monotonic() + wait_s
        began_s = time.monotonic()
        while not (found := condition()):
            now_s = time.monotonic()
            assert now_s < end_s, "waited too long"
            time.sleep(min(LOOK_PAUSE_S_MAX, max(0.05, now_s - began_s)))
            began_s = time.monotonic()
        return found

    # --- calling and reading ------------------------------------------------------------------------------------------

    def client(self, tenant: str = "acme") -> OpenAI:
        """The official client, with no retries of its own."""
        client = OpenAI(base_url=f"{self.base_url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=CALL_WAIT_S)
        self._clients.append(client)
        return client

    def async_client(self, tenant: str = "acme") -> AsyncOpenAI:
        """The same for asyncio."""
        return AsyncOpenAI(
            base_url=f"{self.base_url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=CALL_WAIT_S
        )

    def http(self, tenant: str = "acme") -> httpx.Client:
        """A plain HTTP client that carries the tenant's key."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        client = httpx.Client(base_url=self.base_url, headers=headers, timeout=CALL_WAIT_S, trust_env=False)
        self._clients.append(client)
        return client

    def command(self, *arguments: str, check: bool = True, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `headrace` with these arguments against this stack."""
        argv = [sys.executable, "-m", "cli.main", *arguments]
        return self.run(argv, check=check, text=text)

    def run(self, argv: list[str], *, check: bool = True, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs any program in this stack's environment."""
        env = {**os.environ, **self.env}
        done = subprocess.run(
            argv, cwd=ROOT, env=env, input=text, capture_output=True, text=True, timeout=COMMAND_WAIT_S, check=False
        )
        assert not check or done.returncode == 0, f"{argv[3:]} ended with {done.returncode}: {done.stderr}"
        return done

    def history(self, request_id: str) -> list[Read]:
        """Everything that the log holds of a request."""
        return self.thread.run(history(self.kafka, request_id))

    def timeline(self, request_id: str) -> Timeline:
        """A request's timeline as of now; at least one record."""
        return build(request_id, self.history(request_id))

    def ended(self, request_id: str, wait_s: float = CALL_WAIT_S) -> Timeline:
        """A request's timeline, once its ending is on `lifecycle`."""

        def look() -> Timeline | None:
            records = self.history(request_id)
            names = {r.name for r in records if r.topic == "lifecycle"}
            return (
                build(request_id, records)
                if names & {"InferenceCompleted", "InferenceFailed", "InferenceRejected"}
                else None
            )

        found: Timeline = self.until(look, wait_s)
        return found

    def events(self, request_id: str, name: str, topic: str | None = None) -> list[Read]:
        """A request's events of one kind, in order."""
        return [r for r in self.history(request_id) if r.name == name and topic in (None, r.topic)]


def script(**directions: Any) -> str:
    """A user message that directs the scripted engine's answer."""
    return json.dumps(directions)
