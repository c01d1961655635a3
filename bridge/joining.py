"""A request that was asked before has no stream of its own: its leg reads the first's, from its start, wherever that is."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import structlog
from aiokafka.errors import KafkaError

from bridge.calls import Call, Leg
from bridge.errors import unreachable
from bridge.resume import OPEN_MAX_S, Resumes
from bridge.streams import Dispatcher
from schemas.errors import HeadraceError
from schemas.events import InferenceJoined

_log = structlog.get_logger(__name__)


class Joins:
    """Hears what a front door's own partition tells of repeats."""

    def __init__(self, own: Dispatcher, resumes: Resumes) -> None:
        self._own = own
        self._resumes = resumes
        own.on_joined = self.join

    def join(self, leg: Leg, event: InferenceJoined) -> None:
        """From now on the leg is fed the first's stream. Whatever goes wrong ends its call; nothing it does ends the first."""
        if leg.joined or event.first_request_id == leg.request_id:  # it is told again
            return
        self._own.unregister(leg)
        leg.request_id, leg.joined = event.first_request_id, True
        frees = ExitStack()
        _on_release(leg.call, frees)
        joining = asyncio.create_task(self._join(leg, event, frees), name="join")
        frees.callback(joining.cancel)

    async def _join(self, leg: Leg, event: InferenceJoined, frees: ExitStack) -> None:
        call = leg.call
        try:
            async with asyncio.timeout(OPEN_MAX_S):
                place, offset = await self._resumes.at_start(
                    leg, event.tenant, event.first_reply, event.first_requested_ms, call.shape
                )
                if not (leg.ended or call.done):
                    await self._resumes.follow(place, offset, leg, frees)
        except HeadraceError as error:
            call.fail(error)
        except (TimeoutError, KafkaError, OSError) as error:
            _log.warning("a stream can't be joined", request_id=leg.request_id, error=repr(error))
            call.fail(unreachable())


def _on_release(call: Call, frees: ExitStack) -> None:
    before = call.on_release

    def release() -> None:
        frees.close()
        if before is not None:
            before()

    call.on_release = release
