"""`headrace up` as people run it: one process that starts everything, tells what it does, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra import ports
from tests.system.running import ROOT

pytestmark = pytest.mark.timeout(300)
MODELS = "models: [{name: scripted, engine: scripted, context_length: 4096, partitions: 1}]"
UP_WAIT_S = 150.0
GONE_WAIT_S = 20.0


class Up:
    """One `headrace up`, and what it prints."""

    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        directory.mkdir(exist_ok=True)
        models = directory / "models.yaml"
        models.write_text(MODELS)
        self.data = directory / "data"
        self.port = port or ports.free_port()
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self.env["HEADRACE_DATA"] = str(self.data)
        arguments = ("--models", str(models), "--kafka-port", "0", "--port", str(self.port), *options)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "up", *arguments],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.closing(self.process.stdout) as out:
            self.lines.extend(iter(out.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, words: str) -> None:
        end_s = time.monotonic() + UP_WAIT_S
        while words not in self.text:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text}"
            assert time.monotonic() < end_s, f"{words!r} didn't come:\n{self.text}"
            time.sleep(0.05)

    def ended(self) -> int:
        status = self.process.wait(UP_WAIT_S)
        self._reader.join()
        return status

    def left(self) -> list[str]:
        """What still runs of it, the broker included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("HEADRACE_DATA") == str(self.data) or str(self.data) in " ".join(
                    process.cmdline()
                )
                if mine and process.pid != self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found

    def assert_nothing_left(self) -> None:
        end_s = time.monotonic() + GONE_WAIT_S
        while left := self.left():
            assert time.monotonic() < end_s, left
            time.sleep(0.1)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "cli.main", *arguments]
        return subprocess.run(argv, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def ups() -> Iterator[list[Up]]:
    started: list[Up] = []
    yield started
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def test_once_answers_shows_its_events_and_ends(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path / "up", "--demo", "--once")
    ups.append(up)
    assert up.ended() == 0, up.text
    assert "What is the capital of France?\nWhat is the capital of France?\n" in up.text  # the scripted engine echoes
    assert "first token after" in up.text
    for event in (
        "InferenceRequested",
        "InferenceAdmitted",
        "InferenceScheduled",
        "TokensGenerated",
        "InferenceAnswered",
    ):
        assert event in up.text
    assert up.text.rstrip().endswith("headrace: stopped")
    up.assert_nothing_left()
    assert not (up.data / "up.json").exists()
    assert not (up.data / "addresses.json").exists()
    key = up.data / "secrets" / "default.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.read_text().strip() not in up.text


def test_it_stays_up_for_other_commands_until_ctrl_c(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path / "up")
    ups.append(up)
    up.until("Ctrl-C stops everything.")
    assert f"http://127.0.0.1:{up.port}/docs" in up.text

    status = json.loads(up.command("status", "--json").stdout)
    names = {process["name"] for process in status["processes"]}
    assert names == {
        "supervisor",
        "kafka",
        "worker-scripted-1-0",
        "admission-interactive",
        "admission-batch",
        "endings",
        "lifecycle",
        "bridge",
    }
    assert up.command("chat", "--message", "found without any option").stdout == "found without any option\n"
    assert "work.scripted.1.interactive" in up.command("topics", "list").stdout

    second = up.command("up", "--kafka-port", "0", "--port", str(ports.free_port()))
    assert second.returncode == 1
    assert f"pid {up.process.pid}" in second.stdout + second.stderr

    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 0, up.text
    up.assert_nothing_left()
    after = up.command("status")
    assert (after.returncode, "Nothing runs" in after.stdout) == (1, True)


def test_a_broker_that_is_killed_is_started_again(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path / "up")
    ups.append(up)
    up.until("Ctrl-C stops everything.")
    for restarts in (1, 2):
        processes = json.loads(up.command("status", "--json").stdout)["processes"]
        os.kill(next(process["pid"] for process in processes if process["name"] == "kafka"), signal.SIGKILL)
        up.until(f"restarts={restarts}")
        end_s = time.monotonic() + UP_WAIT_S
        while up.command("chat", "--message", "still there").stdout != "still there\n":
            assert time.monotonic() < end_s, up.text
    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 0, up.text
    up.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", ["Kafka: starting", "bridge: starting"])
def test_a_signal_while_it_starts_stops_what_it_started(
    ups: list[Up], tmp_path: Path, number: signal.Signals, words: str
) -> None:
    up = Up(tmp_path / "up")
    ups.append(up)
    up.until(words)
    time.sleep(0.3)
    up.process.send_signal(number)
    assert up.ended() == 0, up.text
    assert "Traceback" not in up.text
    up.assert_nothing_left()


def test_a_second_ctrl_c_kills(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path / "up")
    ups.append(up)
    up.until("bridge: starting")
    up.process.send_signal(signal.SIGINT)
    up.until("stopping everything")
    up.process.send_signal(signal.SIGINT)
    up.ended()
    assert "Traceback" not in up.text
    up.assert_nothing_left()


def test_killed_it_takes_everything_with_it(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path / "up")
    ups.append(up)
    up.until("bridge: starting")
    up.process.kill()
    up.ended()
    up.assert_nothing_left()


def test_a_port_in_use_is_named_at_once(ups: list[Up], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = Up(tmp_path / "up", port=taken.getsockname()[1])
        ups.append(up)
        assert up.ended() == 1
    assert f"port {up.port} (the front door; --port) is in use by" in up.text
    assert "Kafka" not in up.text
    up.assert_nothing_left()


def test_a_models_file_that_is_wrong_starts_nothing(ups: list[Up], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("models: [{name: x, engine: abacus, artifact: 'package:x', context_length: 1}]")
    up = Up(tmp_path / "up", "--models", str(tmp_path / "bad.yaml"))
    ups.append(up)
    assert up.ended() == 1
    assert up.text.startswith(f"headrace: {tmp_path}/bad.yaml: models[0].engine must be one of")
    assert not up.data.exists()
