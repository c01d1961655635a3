"""decisions/ reads no clock, draws nothing at random, does no I/O and awaits nothing; a look at the source proves it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOM = Path(__file__).parent.parent / "decisions"
FORBIDDEN = {
    "aiokafka", "asyncio", "concurrent", "contextvars", "datetime", "faust", "ftplib", "http", "infra", "io", "logging",
    "multiprocessing", "numpy", "os", "pathlib", "queue", "random", "secrets", "selectors", "shutil", "signal", "socket",
    "sqlite3", "ssl", "streams", "structlog", "subprocess", "sys", "tempfile", "text", "threading", "time", "urllib",
    "uuid", "workers",
}  # fmt: skip
CALLS = {"open", "print", "input", "exec", "eval", "__import__", "id", "hash"}


@pytest.mark.parametrize("path", sorted(ROOM.glob("**/*.py")), ids=lambda path: path.name)
def test_a_decision_is_pure(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                roots = {alias.name.split(".")[0] for alias in node.names}
                assert not roots & FORBIDDEN, f"{path.name}:{node.lineno} imports {roots & FORBIDDEN}"
            case ast.ImportFrom():
                assert (node.module or "").split(".")[0] not in FORBIDDEN, f"{path.name}:{node.lineno}"
            case (
                ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith() | ast.Global() | ast.Nonlocal()
            ):
                pytest.fail(f"{path.name}:{node.lineno} has {type(node).__name__}")
            case ast.Call(func=ast.Name(id=name)):
                assert name not in CALLS, f"{path.name}:{node.lineno} calls {name}"
