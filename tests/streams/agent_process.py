"""An agent as a process of its own: python agent_process.py admission|endings|lifecycle, with settings from the environment."""

from __future__ import annotations

import asyncio
import sys

from infra import process
from infra.settings import AdmissionSettings, EndingsSettings, LifecycleSettings
from streams import admission_app, deadlines, endings


async def main(stop: asyncio.Event) -> None:
    match sys.argv[1]:
        case "admission":
            await admission_app.run(AdmissionSettings.from_env(), stop)
        case "endings":
            await endings.run(EndingsSettings.from_env(), stop)
        case _:
            await deadlines.run(LifecycleSettings.from_env(), stop)


if __name__ == "__main__":
    process.run(main, sys.argv[1])
