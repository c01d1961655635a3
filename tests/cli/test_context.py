from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.context import (
    DEFAULT_URL,
    Addresses,
    addresses_file,
    default_key,
    front_door_url,
    kafka_settings,
    key_file,
    read_addresses,
    write_addresses,
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HEADRACE_KAFKA", "HEADRACE_URL", "HEADRACE_API_KEY"):
        monkeypatch.setenv(name, "")  # empty is absent; and what a test sets is put back
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    return tmp_path


def test_commands_find_what_up_runs(directory: Path) -> None:
    write_addresses(directory, Addresses(os.getpid(), "http://127.0.0.1:1234", "127.0.0.1:5678", {}))
    assert front_door_url() == "http://127.0.0.1:1234"
    assert kafka_settings().bootstrap == "127.0.0.1:5678"


def test_the_environment_comes_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_addresses(directory, Addresses(os.getpid(), "http://127.0.0.1:1234", "127.0.0.1:5678", {}))
    monkeypatch.setenv("HEADRACE_URL", "http://elsewhere:1/")
    monkeypatch.setenv("HEADRACE_KAFKA", "kafka://elsewhere:2")
    assert front_door_url() == "http://elsewhere:1"
    assert kafka_settings().bootstrap == "elsewhere:2"


def test_what_a_dead_run_left_does_not_count(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write_addresses(directory, Addresses(child.pid, "http://127.0.0.1:1234", "127.0.0.1:5678", {}))
    assert read_addresses(directory) is None
    assert front_door_url() == DEFAULT_URL
    assert kafka_settings().bootstrap == "127.0.0.1:9092"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "url": "", "kafka": "", "metrics": {}}'])
def test_a_damaged_file_does_not_count(directory: Path, text: str) -> None:
    addresses_file(directory).write_text(text)
    assert read_addresses(directory) is None


def test_the_key_of_the_tenant_default(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_key() is None
    key_file(directory).parent.mkdir()
    key_file(directory).write_text("hr-1-2\n")
    assert default_key() == "hr-1-2"
    monkeypatch.setenv("HEADRACE_API_KEY", "hr-3-4")
    assert default_key() == "hr-3-4"
