"""Children start in order, are restarted, stop with all they started, and never outlive their supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from infra import ports, supervisor
from infra.child_log import LINE_MAX_BYTES, ChildLog
from infra.supervisor import ChildFailed, ChildSpec, ChildState, Supervisor
from infra.up_file import AlreadyRunning, ProcessId, UpFile

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0

# Each prints the pid of a process that it starts in turn, so that the tests can see both end.
SLEEPER = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("inner", inner.pid, flush=True)
time.sleep(600)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER
PARENT = """
import signal, subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('inner was told', flush=True)); print('up', flush=True); time.sleep(600)"
inner = subprocess.Popen([sys.executable, "-c", code])
def end(*_):
    print("inner is", "gone" if inner.poll() is not None else "alive", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
inner.wait()
"""
SERVER = """
import http.server, sys, time
ready_at = time.monotonic() + float(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.monotonic() >= ready_at
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b"ok" if ready else b"loading weights")
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def python(
    name: str, code: str, *args: str, ops_port: int | None = None, restart: bool = True, stage: int = 1
) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code, *args), ops_port=ops_port, restart=restart, stage=stage)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 0.01)
    monkeypatch.setattr(supervisor, "RESTART_MAX_S", 0.05)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Supervisor]:
    watched = Supervisor(tmp_path)
    yield watched
    await watched.stop_all(grace_s=5)


async def until(true: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up_at, f"waited in vain: {what}"
        await asyncio.sleep(0.02)


def log_of(tmp_path: Path, name: str) -> str:
    path = tmp_path / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def inner_pid(tmp_path: Path, name: str) -> int:
    await until(lambda: "inner" in log_of(tmp_path, name), "the inner process")
    return int(log_of(tmp_path, name).split("inner ")[-1].split()[0])


def claimed(tmp_path: Path) -> list[str]:
    """What a new run would find left by an earlier one."""
    up_file = UpFile(tmp_path)
    left = up_file.claim()
    up_file.release()
    return left


def status(watched: Supervisor, name: str) -> supervisor.ChildStatus:
    return next(child for child in watched.status() if child.name == name)


async def test_a_child_is_ready_when_it_says_so(running: Supervisor) -> None:
    port = ports.free_port()
    await running.start(python("bridge", SERVER, str(port), "0.3", ops_port=port))
    await running.ready("bridge", WAIT_S)

    assert status(running, "bridge").state is ChildState.RUNNING
    assert status(running, "bridge").pid


async def test_a_child_that_is_never_ready_is_reported_with_its_reason(running: Supervisor) -> None:
    port = ports.free_port()
    await running.start(python("bridge", SERVER, str(port), "600", ops_port=port))

    with pytest.raises(ChildFailed, match=r"bridge is not ready after 3 s: (loading weights|it has not answered yet)"):
        await running.ready("bridge", 3)


async def test_a_child_that_crashes_at_its_start_is_reported_with_its_last_words(running: Supervisor) -> None:
    port = ports.free_port()
    await running.start(python("worker", "raise SystemExit('no such model: tiny')", ops_port=port))

    with pytest.raises(ChildFailed, match=r"worker crashed \d+ times, last with status 1(.|\n)*no such model: tiny"):
        await running.ready("worker", WAIT_S)


async def test_a_program_that_does_not_exist_is_not_tried_again(running: Supervisor) -> None:
    await running.start(ChildSpec("worker", ("/no/such/program",), ops_port=ports.free_port()))

    with pytest.raises(ChildFailed, match=r"status 127(.|\n)*can't start /no/such/program"):
        await running.ready("worker", WAIT_S)
    assert status(running, "worker").restarts == 0
    assert status(running, "worker").state is ChildState.FAILED


async def test_stopping_stops_what_the_child_started(running: Supervisor, tmp_path: Path) -> None:
    await running.start(python("worker", SLEEPER))
    inner = await inner_pid(tmp_path, "worker")
    await running.stop("worker")

    await until(lambda: gone(inner), "the end of the inner process")
    assert status(running, "worker").state is ChildState.STOPPED
    assert status(running, "worker").restarts == 0


async def test_a_child_alone_is_told_to_stop_and_decides_for_what_it_started(
    running: Supervisor, tmp_path: Path
) -> None:
    await running.start(python("parent", PARENT))
    await until(lambda: "up" in log_of(tmp_path, "parent"), "the inner process")
    await running.stop("parent")

    assert "inner is alive" in log_of(tmp_path, "parent")
    assert "inner was told" not in log_of(tmp_path, "parent")


async def test_a_child_that_ignores_sigterm_is_killed(running: Supervisor, tmp_path: Path) -> None:
    await running.start(python("worker", DEAF))
    inner = await inner_pid(tmp_path, "worker")
    await running.stop("worker", grace_s=0.3)

    await until(lambda: gone(inner), "the end of the inner process")
    assert status(running, "worker").exit_status == -signal.SIGKILL


async def test_a_killed_child_is_restarted_and_what_it_started_is_not_left(running: Supervisor, tmp_path: Path) -> None:
    await running.start(python("worker", SLEEPER))
    inner = await inner_pid(tmp_path, "worker")
    first = status(running, "worker").pid
    assert first is not None
    os.kill(first, signal.SIGKILL)

    await until(lambda: status(running, "worker").pid not in (None, first), "a restart")
    await until(lambda: gone(inner), "the end of the first inner process")
    assert status(running, "worker").restarts == 1


async def test_a_child_that_keeps_crashing_is_given_up(running: Supervisor) -> None:
    await running.start(python("worker", "raise SystemExit(3)"))

    await until(lambda: status(running, "worker").state is ChildState.FAILED, "giving up")
    assert status(running, "worker").restarts == supervisor.RESTARTS_MAX
    assert status(running, "worker").exit_status == 3


async def test_a_child_that_must_not_restart_stays_down(running: Supervisor) -> None:
    await running.start(python("topics", "raise SystemExit(0)", restart=False))

    await until(lambda: status(running, "topics").state is ChildState.STOPPED, "its end")
    assert status(running, "topics").restarts == 0


async def test_a_child_can_be_stopped_while_it_waits_to_restart(
    running: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 600.0)
    monkeypatch.setattr(supervisor, "RESTART_MAX_S", 600.0)
    await running.start(python("worker", "raise SystemExit(3)"))
    await until(lambda: status(running, "worker").state is ChildState.WAITING, "the wait")
    await running.stop("worker")

    assert status(running, "worker").state is ChildState.STOPPED


async def test_a_stopped_child_can_be_started_again_and_a_running_one_not_twice(running: Supervisor) -> None:
    spec = python("worker", SLEEPER)
    await running.start(spec)
    with pytest.raises(ChildFailed, match="already runs"):
        await running.start(spec)
    await running.stop("worker")
    await running.start(spec)

    assert status(running, "worker").state is ChildState.RUNNING
    with pytest.raises(ChildFailed, match="no child is called bridge"):
        await running.stop("bridge")


async def test_output_held_open_by_a_process_that_left_the_group_holds_up_nothing(
    running: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "OUTPUT_WAIT_S", 0.1)
    code = SLEEPER.replace('600)"]', '600)"], start_new_session=True')
    await running.start(python("worker", code))
    inner = await inner_pid(tmp_path, "worker")
    await running.stop("worker")

    assert status(running, "worker").state is ChildState.STOPPED
    os.kill(inner, signal.SIGKILL)


async def test_a_port_in_use_is_named_before_the_child_starts(running: Supervisor) -> None:
    with ports.bind(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ports.PortInUse, match=rf"port {port} \(worker, metrics and health\) is in use by .+ \(pid \d+\)"
        ):
            await running.start(python("worker", SLEEPER, ops_port=port))


async def test_all_stop_from_the_highest_stage_down(tmp_path: Path) -> None:
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'), sys.exit()))\nprint('inner 0', flush=True)\ntime.sleep(600)"
    record = tmp_path / "stopped"
    watched = Supervisor(tmp_path)
    for name, stage in (("broker", 0), ("worker", 1), ("bridge", 2)):
        await watched.start(python(name, code, str(record), name, stage=stage))
        await inner_pid(tmp_path, name)
    await watched.stop_all()

    assert record.read_text().split() == ["bridge", "worker", "broker"]
    assert not (tmp_path / "up.json").exists()


async def test_what_children_print_is_kept_under_their_names(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    watched = Supervisor(tmp_path, on_line=lambda name, line: seen.append((name, line)))
    await watched.start(python("worker", "import sys; print('out'); print('err', file=sys.stderr)", restart=False))
    await until(lambda: status(watched, "worker").state is ChildState.STOPPED, "its end")
    await watched.stop_all()

    assert sorted(seen) == [("worker", "err"), ("worker", "out")]
    for line in log_of(tmp_path, "worker").splitlines():
        assert line.startswith("worker ")
        assert " | " in line


async def test_a_log_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.child_log.LOG_MAX_BYTES", 1000)
    reader = asyncio.StreamReader()
    for number in range(100):
        reader.feed_data(f"line {number} ".encode() + b"x" * 50 + b"\n")
    reader.feed_data(b"y" * (LINE_MAX_BYTES + 5))
    reader.feed_eof()
    monkeypatch.setattr("infra.child_log.READ_BYTES", 500)
    child_log = ChildLog(tmp_path / "w.log", "w")
    await child_log.follow(reader, 7)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.log", "w.log.1"]
    assert (tmp_path / "w.log.1").stat().st_size < LINE_MAX_BYTES + 3000
    assert child_log.tail[-1] == "y" * 5


async def test_output_is_read_to_its_end_though_the_disk_is_full() -> None:
    reader = asyncio.StreamReader()
    for number in range(1000):
        reader.feed_data(b"x" * 200 + f" {number}\n".encode())
    reader.feed_eof()
    child_log = ChildLog(Path("/dev/full"), "w")
    await child_log.follow(reader, 7)
    assert child_log.tail[-1].endswith(" 999")


async def test_a_child_is_restarted_though_the_state_file_cannot_be_written(
    running: Supervisor, tmp_path: Path
) -> None:
    await running.start(python("worker", "import sys; sys.exit(3)"))
    (tmp_path / "up.json.new").mkdir()  # where the next state is written first
    await until(lambda: status(running, "worker").restarts >= 2, "its restarts")


# --- one run a data directory ---


async def test_the_state_file_names_what_runs(running: Supervisor, tmp_path: Path) -> None:
    await running.start(python("worker", SLEEPER))
    state = json.loads((tmp_path / "up.json").read_text())

    assert state["supervisor"]["pid"] == os.getpid()
    assert [child["name"] for child in state["children"]] == ["worker"]
    assert ProcessId(**state["children"][0]).alive()


async def test_a_second_run_on_a_directory_is_refused_with_the_firsts_pid(running: Supervisor, tmp_path: Path) -> None:
    await running.start(python("worker", SLEEPER))

    with pytest.raises(AlreadyRunning, match=rf"already runs in .*: pid {os.getpid()}.*`kill {os.getpid()}`") as error:
        Supervisor(tmp_path).claim()
    assert error.value.pids == [os.getpid()]


def test_what_an_earlier_run_left_running_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.up_file.LEFTOVERS_WAIT_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as left:
        state = {
            "supervisor": {"name": "supervisor", "pid": 4_000_000, "started_at_s": 1.0},
            "children": [_entry("worker", left.pid)],
        }
        (tmp_path / "up.json").write_text(json.dumps(state))
        with pytest.raises(AlreadyRunning, match=rf"left running: worker \(pid {left.pid}\).*kill -9 {left.pid}"):
            UpFile(tmp_path).claim()
        left.kill()
    assert claimed(tmp_path) == ["worker"]


def test_a_reused_pid_is_not_taken_for_a_child(tmp_path: Path) -> None:
    entry = {**_entry("worker", os.getpid()), "started_at_s": 1.0}
    state = {"supervisor": {"name": "supervisor", "pid": 4_000_000, "started_at_s": 1.0}, "children": [entry]}
    (tmp_path / "up.json").write_text(json.dumps(state))

    assert claimed(tmp_path) == ["worker"]


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"supervisor": 1}', "\0" * 100])
def test_a_torn_state_file_is_no_obstacle(tmp_path: Path, junk: str) -> None:
    (tmp_path / "up.json").write_text(junk)
    assert claimed(tmp_path) == []


def _entry(name: str, pid: int) -> dict[str, object]:
    return {"name": name, "pid": pid, "started_at_s": psutil.Process(pid).create_time()}


# --- the supervisor's own end ---

SUPERVISOR = f"""
import asyncio, sys
from pathlib import Path
from infra.supervisor import ChildSpec, Supervisor

async def main():
    supervisor = Supervisor(Path(sys.argv[1]))
    adopted = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)", start_new_session=True)
    await supervisor.adopt("broker", adopted.pid)
    await supervisor.start(ChildSpec("worker", (sys.executable, "-c", {SLEEPER!r})))
    print("adopted", adopted.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_no_process_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:  # noqa: ASYNC220
        assert killed.stdout is not None
        line = ""
        while not line.startswith("adopted"):
            line = await asyncio.to_thread(killed.stdout.readline)
        adopted = int(line.split()[1])
        inner = await inner_pid(tmp_path, "worker")
        children = json.loads((tmp_path / "up.json").read_text())["children"]
        killed.kill()
    pids = [adopted, inner, *(child["pid"] for child in children)]
    assert len(set(pids)) == 3

    await until(lambda: all(gone(pid) for pid in pids), f"the end of {pids}")
    assert sorted(claimed(tmp_path)) == ["broker", "worker"]
