"""The processes that serve: `headrace bridge`, `headrace streams …`, `headrace worker`. Each runs until it is told to stop."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from cli.context import use_running_kafka
from schemas.topics import TIERS

S = TypeVar("S")
OPS_PORT = click.option("--ops-port", type=click.IntRange(0, 65535), help="Serve /metrics, /livez and /readyz here.")


def settings_of(cls: type[S], **given: Any) -> S:
    """A process's settings from the environment, with the options that were given in place of it."""
    use_running_kafka()
    settings: Any = cls.from_env()  # type: ignore[attr-defined]
    result: S = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    return result


def serve(process: str, run: Callable[..., Any], *arguments: object) -> None:
    """Runs one process until a signal stops it."""
    from infra.process import run as run_process

    run_process(functools.partial(run, *arguments), process)


@click.command()
@click.option("--host", help="Listen on this address.")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on this port (default 8000).")
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="Serve gRPC on this port (default 0: not at all).")
@OPS_PORT
def bridge(host: str | None, port: int | None, grpc_port: int | None, ops_port: int | None) -> None:
    """Run a front door: OpenAI's API over HTTP and SSE, a WebSocket, and the Open Inference Protocol over HTTP and gRPC."""
    from bridge.main import run
    from infra.settings import BridgeSettings

    serve("bridge", run, settings_of(BridgeSettings, host=host, port=port, grpc_port=grpc_port, ops_port=ops_port))


@click.group()
def streams() -> None:
    """Run a stream process: the rules applied to the log."""


@streams.command()
@click.option(
    "--tier", type=click.Choice(TIERS), default=None, help="The tier whose requests it judges (default interactive)."
)
@OPS_PORT
def admission(tier: str | None, ops_port: int | None) -> None:
    """Judge requests: admit and place them, or refuse them."""
    from infra.settings import AdmissionSettings
    from streams.admission_app import run

    settings = settings_of(AdmissionSettings, tier=tier, ops_port=ops_port)
    serve(f"admission-{settings.tier}", run, settings)


@streams.command()
@OPS_PORT
def endings(ops_port: int | None) -> None:
    """Fold the token streams; alone writes endings and answers."""
    from infra.settings import EndingsSettings
    from streams.endings import run

    serve("endings", run, settings_of(EndingsSettings, ops_port=ops_port))


@streams.command()
@OPS_PORT
def lifecycle(ops_port: int | None) -> None:
    """Keep deadlines and time limits, whatever the workers do, and remove old payloads."""
    from infra.settings import LifecycleSettings
    from streams.deadlines import run

    serve("lifecycle", run, settings_of(LifecycleSettings, ops_port=ops_port))


@click.command()
@click.argument("model")
@click.argument("version")
@click.option("--worker-id", help="Its name on the topic `workers` (default: made from the host's name).")
@click.option("--slots", type=click.IntRange(1), help="Requests at once (default: what the model's registration says).")
@OPS_PORT
def worker(model: str, version: str, worker_id: str | None, slots: int | None, ops_port: int | None) -> None:
    """Run a model server for VERSION of MODEL."""
    from infra.settings import WorkerSettings
    from workers.main import run

    given = {"worker_id": worker_id, "slots": slots, "ops_port": ops_port}
    settings, status = settings_of(WorkerSettings, **given), 0
    try:
        serve("worker", run, settings, model, version)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    # Everything is closed. What an engine leaves to the interpreter's end (vLLM's finalizers) prints a traceback, and can hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
