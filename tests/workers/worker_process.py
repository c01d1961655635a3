"""A worker as a process of its own: python worker_process.py MODEL VERSION, with settings from the environment."""

from __future__ import annotations

import asyncio
import sys

from infra import process
from infra.settings import WorkerSettings
from workers.main import run


async def main(stop: asyncio.Event) -> None:
    await run(WorkerSettings.from_env(), sys.argv[1], sys.argv[2], stop)


if __name__ == "__main__":
    process.run(main, "worker")
