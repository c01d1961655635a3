"""A request that was asked before has no stream of its own: its leg reads the first's, from its start, wherever that is."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import structlog
from aiokafka.errors import KafkaError

from bridge.calls import Call, Leg
from bridge.errors import unreachable
from bridge.resume import OPEN_MAX_S, Resumes, place_of
from bridge.streams import Dispatcher
from schemas.errors import HeadraceError
from schemas.events import InferenceJoined

_log = structlog.get_logger(__name__)


class Joins:
    """Hears what the partitions tell of repeats: this front door's own, and those in which streams are taken up again."""

    def __init__(self, own: Dispatcher, resumes: Resumes) -> None:
        self._resumes = resumes
        own.on_joined = self.join
        resumes.on_joined(self.join)

    def join(self, leg: Leg, event: InferenceJoined, heard: Dispatcher) -> bool:
        """From now on the leg is fed the first's stream, and by `heard` no more; whether that is so. Whatever goes wrong ends its call; nothing it
        does ends the first.
        """
        if leg.joined or leg.offset >= 0 or leg.call.done:  # it is told again, goes on by itself, or has ended
            return False
        first = event.first_request_id, place_of(event.first_reply)
        if first == (leg.request_id, heard.partition):  # asked twice under its own id, and it is here already
            return False
        heard.unregister(leg)
        leg.request_id, leg.joined = event.first_request_id, True
        frees = ExitStack()
        _on_release(leg.call, frees)
        joining = asyncio.create_task(self._join(leg, event, frees), name="join")
        frees.callback(joining.cancel)
        return True

    async def _join(self, leg: Leg, event: InferenceJoined, frees: ExitStack) -> None:
        call = leg.call
        if call.resumed:
            call.reply = event.first_reply
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
