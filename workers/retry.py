"""Goes on trying what only the broker's absence prevents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from schemas.errors import HeadraceError

log = structlog.get_logger("worker")

FIRST_WAIT_S = 0.2
WAIT_MAX_S = 5.0
TRIES_MAX = 200
"""About a quarter of an hour: then the worker gives up, and exits."""

Result = TypeVar("Result")


async def persist(call: Callable[[], Awaitable[Result]]) -> Result:
    """What `call` returns, tried again after every retriable HeadraceError. Any other error, and the last one, is raised."""
    wait_s = FIRST_WAIT_S
    for _ in range(TRIES_MAX - 1):
        try:
            return await call()
        except HeadraceError as error:
            if not error.retriable:
                raise
            log.warning("the log can't be written; trying again", message=error.message, wait_s=wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, WAIT_MAX_S)
    return await call()
