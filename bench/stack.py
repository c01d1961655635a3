"""A private Headrace for one benchmark: the same processes that `headrace up` starts, on free ports, in a directory that goes afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from cli.context import console
from cli.progress import Board
from cli.stack import Stack, StackOptions
from infra.models_file import ModelEntry
from infra.ports import free_port


@contextlib.asynccontextmanager
async def private_stack(
    models: tuple[ModelEntry, ...], env: Mapping[str, str] | None = None, partitions: Mapping[str, int] | None = None
) -> AsyncIterator[Stack]:
    """Everything up with these models, embedded Kafka included; progress goes to standard error.

    `env` is added to every process's environment; `partitions` has fields of `PartitionCounts`. Artifacts must be directories or `scripted`: the data directory is new and empty.
    Raises HeadraceError if it doesn't come up. Call from the main thread's event loop.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True) as directory:
        options = StackOptions(
            Path(directory),
            models,
            kafka_port=0,
            port=free_port(),
            ops_ports_from=0,
            env=dict(env or {}),
            partitions=partitions or {},
        )
        stack = Stack(options, Board(console(stderr=True)))
        try:
            with stack.board:
                await stack.start()
            yield stack
        finally:
            await stack.stop()


@contextlib.contextmanager
def stopped(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """They stand still meanwhile."""
    halted = list(processes)
    try:
        for process in halted:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in halted:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
