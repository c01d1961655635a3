"""The frame of a process: it stops when told, and ends whatever its tasks do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio
from infra import process
from schemas.errors import HeadraceError
from schemas.reasons import Reason
process.STOP_GRACE_S = 0.5
process.CANCEL_GRACE_S = process.LEAVE_GRACE_S = 0.5

async def orderly(stop):
    print("up", flush=True)
    await stop.wait()
    print("down", flush=True)

async def refused(stop):
    raise HeadraceError(Reason.UNAVAILABLE, "the log can't be reached")

async def crash(stop):
    raise ValueError("a bug")

async def deaf(stop):
    print("up", flush=True)
    await asyncio.sleep(60)

async def stubborn(stop):
    print("up", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def left_behind(stop):
    beside = asyncio.create_task(stubborn(stop))
    await asyncio.sleep(0)
    raise HeadraceError(Reason.UNAVAILABLE, "the log can't be reached")

process.run({name}, "sample")
print("returned", flush=True)
"""


def _start(name: str) -> subprocess.Popen[str]:
    code = PROGRAM.replace("{name}", name)
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_process_in_order(number: signal.Signals) -> None:
    with _start("orderly") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert out == "down\nreturned\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("name", "words"), [("refused", "the log can't be reached"), ("crash", "ValueError: a bug")])
def test_a_crash_is_logged_and_exits_1(name: str, words: str) -> None:
    with _start(name) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert words in err
    assert ("Traceback" in err) is (name == "crash")


@pytest.mark.parametrize("name", ["deaf", "stubborn"])
def test_a_process_that_does_not_stop_is_stopped(name: str) -> None:
    with _start(name) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "did not stop in time" in err


def test_a_task_that_swallows_its_cancellation_holds_no_process() -> None:
    with _start("left_behind") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the log can't be reached" in err
