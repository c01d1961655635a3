"""`headrace up`: all of Headrace on this machine, in one terminal, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.context import console, data_dir, key_file, table
from schemas.errors import HeadraceError

if TYPE_CHECKING:
    from rich.console import Console

    from cli.stack import Stack, StackOptions

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.option(
    "--models",
    "models_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What to serve (YAML; default: SmolLM2, MiniLM and Magika from their packages).",
)
@click.option(
    "--demo", is_flag=True, help="Ask one question and the small models, show the answers and the log's events."
)
@click.option("--once", is_flag=True, help="End when that is done.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The front door's address.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="The front door's port.")
@click.option(
    "--kafka-port",
    type=click.IntRange(0, 65535),
    default=9092,
    show_default=True,
    help="The embedded broker's port; 0 takes any.",
)
def up(models_file: Path | None, demo: bool, once: bool, host: str, port: int, kafka_port: int) -> int:
    """Start everything on this machine, and stop it with Ctrl-C.

    Real Kafka (or the cluster that HEADRACE_KAFKA names), admission, endings, lifecycle, the front door and a worker for each model. Data, logs and
    secrets are kept in HEADRACE_DATA (default .headrace).
    """
    from cli.stack import StackOptions
    from infra.models_file import default_models, load
    from infra.settings import KafkaSettings
    from infra.telemetry import configure_logging

    configure_logging("up", json=False, level="warning")
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what it can't do reaches us as errors
    options = StackOptions(
        data_dir=data_dir(),
        models=load(models_file) if models_file else default_models(),
        kafka=KafkaSettings.from_env() if os.environ.get("HEADRACE_KAFKA") else None,
        kafka_port=kafka_port,
        host=host,
        port=port,
    )
    return asyncio.run(supervise(options, console(), demo=demo, once=once))


async def supervise(options: StackOptions, out: Console, *, demo: bool, once: bool) -> int:
    """Runs it all until a signal; the first one stops, a second one kills. Returns the exit status."""
    from cli.progress import Board
    from cli.stack import Stack

    stack = Stack(options, Board(out))
    work = asyncio.create_task(_run(stack, out, demo=demo, once=once))
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            work.cancel()
        else:
            stack.kill()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await work
    except asyncio.CancelledError:
        return 0
    except HeadraceError as error:
        out.print(f"headrace: {error.message}", style="red", markup=False)
        return 1


async def _run(stack: Stack, out: Console, *, demo: bool, once: bool) -> int:
    try:
        with stack.board:
            await stack.start()
        out.print(f"[bold]Headrace is up[/] after {stack.board.elapsed_s:.1f} s.")
        if demo or once:
            request_id = await _demo(stack, out)
            if once:
                return 1 if request_id is None else 0
        else:
            request_id = None
        show_addresses(stack, out, request_id)
        await stack.keep()
        return 0
    finally:
        if stack.started:
            out.print("headrace: stopping everything (Ctrl-C again kills)", style="dim")
        await stack.stop()
        if stack.started:
            out.print("headrace: stopped", style="dim")


async def _demo(stack: Stack, out: Console) -> str | None:
    """The question's request id ("" if no model talks), or None if the demo failed, which it says."""
    from cli import demo

    request_id = ""
    try:
        if demo.talks(stack.options.models):
            answer = await demo.ask(stack, out)
            request_id = (await demo.show_events(stack, answer.request_id, out)).request_id
        await demo.show_small(stack, out)
    except HeadraceError as error:
        out.print(f"headrace: the demo failed: {error.message}", style="red", markup=False)
        return None
    return request_id


def show_addresses(stack: Stack, out: Console, request_id: str | None) -> None:
    """Where everything is, and what to try next."""
    directory = stack.options.data_dir
    places = table("what", "where")
    places.add_row("front door", f"{stack.url}/v1 (OpenAI's API), {stack.url}/docs (its description)")
    places.add_row("Open Inference Protocol", f"{stack.url}/v2, and by gRPC {stack.grpc_address}")
    places.add_row("Kafka", stack.kafka.bootstrap)
    places.add_row("API key", f"{_near(key_file(directory))} (tenant default)")
    places.add_row("logs", f"{_near(directory / 'logs')}/")
    for name, port in stack.ops_ports.items():
        places.add_row(f"metrics of {name}", f"http://127.0.0.1:{port}/metrics")
    out.print(places)
    command = command_name(directory)
    out.print("Try, in another terminal:", style="bold")
    for line in (
        *_questions(stack, command),
        f"{command} explain {request_id or 'REQUEST_ID'}",
        f"{command} topics tail tokens",
        f"{command} status",
    ):
        out.print(f"  {line}", markup=False)
    out.print("Ctrl-C stops everything.")


def _questions(stack: Stack, command: str) -> list[str]:
    """How to ask what is served: the first model that talks, or else each of the small ones."""
    from cli.demo import MAX_TOKENS, talks
    from schemas.processors import BYTES_CLASSIFICATION, EMBEDDING, TEXT_CLASSIFICATION

    talking = talks(stack.options.models)
    if not talking:
        lines = {
            EMBEDDING: 'embed {model} "Water drives the mill." "Rain falls."',
            TEXT_CLASSIFICATION: 'classify {model} --text "Water drives the mill."',
            BYTES_CLASSIFICATION: "classify {model} FILE",
        }
        small = [(entry.name, lines[entry.processor]) for entry in stack.options.models if entry.processor in lines]
        return [f"{command} {line.format(model=name)}" for name, line in small]
    body = {
        "model": talking[0].name,
        "stream": True,
        "max_tokens": MAX_TOKENS,  # a small model may find no end by itself
        "temperature": 0,
        "messages": [{"role": "user", "content": "Name three rivers."}],
    }
    key = _near(key_file(stack.options.data_dir))
    return [
        f"{command} chat",
        (
            f'curl -N {stack.url}/v1/chat/completions -H "Authorization: Bearer $(cat {key})" '
            f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
        ),
    ]


def command_name(directory: Path) -> str:
    """How to call `headrace` from where the user stands, on this data directory."""
    own = Path(sys.executable).parent / "headrace"
    found = shutil.which("headrace")
    name = "headrace" if found and Path(found).resolve() == own.resolve() else _near(own)
    return name if directory == Path(".headrace").absolute() else f"{name} --data {_near(directory)}"


def _near(path: Path) -> str:
    """A path from the working directory on if it is below it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
