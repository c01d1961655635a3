"""An agent as a process of its own: python agent_process.py admission|endings, with settings from the environment."""

from __future__ import annotations

import asyncio
import sys

from infra import process
from infra.settings import AdmissionSettings, EndingsSettings
from streams import admission, endings


async def main(stop: asyncio.Event) -> None:
    if sys.argv[1] == "admission":
        await admission.run(AdmissionSettings.from_env(), stop)
    else:
        await endings.run(EndingsSettings.from_env(), stop)


if __name__ == "__main__":
    process.run(main, sys.argv[1])
