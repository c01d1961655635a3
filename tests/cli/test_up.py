"""What `headrace up` says, to the person at the terminal."""

from __future__ import annotations

import io
import json
import shlex
import socket
from pathlib import Path

import pytest
from rich.console import Console

from cli.progress import Board
from cli.stack import Stack, StackOptions
from cli.up import show_addresses, supervise
from infra import ports
from infra.models_file import SCRIPTED, ModelEntry
from infra.up_file import UpFile
from schemas.processors import BYTES_CLASSIFICATION, EMBEDDING

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


def shown(tmp_path: Path, *models: ModelEntry) -> str:
    out, text = console()
    stack = Stack(StackOptions(tmp_path, models, kafka_port=0, port=ports.free_port()), Board(out))
    show_addresses(stack, out, None)
    return text.getvalue()


def test_only_a_model_that_talks_is_asked_to_talk(tmp_path: Path) -> None:
    embeds = ModelEntry("embeds", "1", "onnx", "package:x", 100, processor=EMBEDDING)
    sorts = ModelEntry("sorts", "1", "onnx", "package:y", 100, processor=BYTES_CLASSIFICATION)
    (line,) = (line for line in shown(tmp_path, embeds, MODEL).splitlines() if line.strip().startswith("curl "))
    assert f'"model": "{MODEL.name}"' in line
    silent = shown(tmp_path, embeds, sorts)
    assert "curl" not in silent
    assert "headrace chat" not in silent
    assert " embed embeds " in silent
    assert " classify sorts FILE" in silent


async def test_a_second_one_says_only_that_there_is_a_first(tmp_path: Path) -> None:
    out, text = console()
    first = UpFile(tmp_path)
    first.claim()
    first.write([])
    assert await supervise(options(tmp_path), out, demo=True, once=False) == 1
    first.release()
    assert len(text.getvalue().splitlines()) == 1
    assert f"Headrace already runs in {tmp_path}: pid " in text.getvalue()


@pytest.mark.parametrize("which", ["--port", "--kafka-port"])
async def test_a_port_in_use_is_all_it_says(tmp_path: Path, which: str) -> None:
    out, text = console()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = options(tmp_path, port) if which == "--port" else StackOptions(tmp_path, (MODEL,), kafka_port=port)
        assert await supervise(given, out, demo=False, once=False) == 1
    assert len(text.getvalue().splitlines()) == 1
    assert f"port {port} " in text.getvalue()
    assert f"{which}) is in use" in text.getvalue()
    assert not (tmp_path / "up.json").exists()
