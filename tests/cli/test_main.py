from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from cli import main
from schemas.errors import HeadraceError
from schemas.reasons import Reason

HEAVY = ("aiokafka", "faust", "torch", "vllm", "starlette", "httpx", "rich", "fastavro", "pydantic", "structlog")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, cli.main\n"
        "try: cli.main.cli.main(['--help'], standalone_mode=True)\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    for name in main.COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(main.cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_every_command_is_told_apart_in_one_line() -> None:
    for name, (place, text) in main.COMMANDS.items():
        command = main.cli.get_command(click.Context(main.cli), name)
        assert command is not None, place
        assert len(text) < 60


@pytest.mark.parametrize("module", ["bridge.main", "streams.admission_app", "streams.endings", "streams.deadlines"])
def test_a_front_door_or_stream_imports_no_model_server(module: str) -> None:
    code = f"import sys, {module}, cli.processes; print([n for n in ('torch', 'vllm', 'transformers', 'onnxruntime') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _fail(error: BaseException) -> int:
    def command() -> None:
        raise error

    return main.run(command)


def test_an_error_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    assert _fail(HeadraceError(Reason.NOT_FOUND, "there is no such thing")) == main.FAILED
    assert capsys.readouterr().err == "headrace: there is no such thing\n"
    assert _fail(HeadraceError(Reason.INVALID_REQUEST, "it is too long", param="name")) == main.FAILED
    assert capsys.readouterr().err == "headrace: name: it is too long\n"
    assert _fail(ZeroDivisionError("by zero")) == main.FAILED
    assert capsys.readouterr().err == "headrace: ZeroDivisionError: by zero (HEADRACE_DEBUG=1 shows where)\n"
    assert _fail(FileNotFoundError(2, "No such file or directory", "x.yaml")) == main.FAILED
    assert capsys.readouterr().err == "headrace: x.yaml: No such file or directory\n"


def test_debug_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        _fail(ZeroDivisionError("by zero"))


def test_usage_is_2_and_an_interrupt_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert _fail(click.UsageError("wrong")) == main.USAGE
    assert _fail(KeyboardInterrupt()) == main.INTERRUPTED
    assert _fail(click.exceptions.Exit(3)) == 3
    assert "wrong" in capsys.readouterr().err


def test_a_command_says_its_status() -> None:
    assert main.run(lambda: 1) == 1
    assert main.run(lambda: None) == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["topics", "tail", "x", "--from", "3"], "neither beginning, end, nor -N"),
        (["tenants", "grant", "x", "--expires", "forever"], "no duration"),
        (["tenants", "create", "x", "--tiers", "gold"], "gold is no tier"),
        (["tenants", "create", "x", "--tiers", ","], "nothing is no tier"),
        (["chat", "--json"], "--json needs --message"),
        (["bench", "nonsense"], "there is no benchmark 'nonsense'"),
        (["up", "--port", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage_names_what_is_wrong(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(main.cli, arguments)
    assert result.exit_code == main.USAGE
    assert told in result.output


def test_an_unreachable_cluster_is_one_line() -> None:
    env = {**os.environ, "HEADRACE_KAFKA": "127.0.0.1:1"}
    for arguments in (["topics", "list"], ["topics", "ensure"], ["tenants", "list"], ["models", "list"]):
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == main.FAILED
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "127.0.0.1:1" in done.stderr


def test_a_bad_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA", "http://broker")
    result = CliRunner().invoke(main.cli, ["topics", "list"])
    assert isinstance(result.exception, HeadraceError)
    assert "HEADRACE_KAFKA takes host:port" in result.exception.message
