"""Hears that a caller has left, and ends what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Receive

from bridge.calls import Call
from bridge.servers import on_left
from schemas.errors import HeadraceError
from schemas.reasons import Reason


def end_when_left(request: Request, call: Call) -> Callable[[], None]:
    """Fails the call once the caller's connection is gone, until what is returned is called. The request's body must have been read."""

    def left() -> None:
        call.fail(HeadraceError(Reason.CANCELLED, Reason.CANCELLED.text))

    if (stop := on_left(request.scope, left)) is not None:
        return stop
    watching = asyncio.create_task(_watch(request.receive, left), name="disconnect")  # under another server than ours

    def stop_watching() -> None:
        watching.cancel()

    return stop_watching


async def _watch(receive: Receive, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()
