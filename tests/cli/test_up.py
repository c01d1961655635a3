"""What `headrace up` says, to the person at the terminal."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

from rich.console import Console

from cli.progress import Board
from cli.stack import Stack, StackOptions
from cli.up import show_addresses
from infra import ports
from infra.models_file import SCRIPTED, ModelEntry

MODEL = ModelEntry("small", "1", "scripted", SCRIPTED, context_length=100)


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200, soft_wrap=True, highlight=False), out


def options(tmp_path: Path, port: int | None = None) -> StackOptions:
    return StackOptions(tmp_path, (MODEL,), kafka_port=0, port=port or ports.free_port())


def test_the_curl_it_shows_asks_for_a_short_answer(tmp_path: Path) -> None:
    out, text = console()
    show_addresses(Stack(options(tmp_path), Board(out)), out, None)
    (line,) = (line for line in text.getvalue().splitlines() if line.strip().startswith("curl "))
    words = shlex.split(line)
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == (MODEL.name, True)
    assert (body["max_tokens"], body["temperature"]) == (64, 0)
