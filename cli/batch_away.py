"""How long a batch job waits for what is away: the log, and the object store that holds an answer."""

from __future__ import annotations

import asyncio

from infra.log import EventDecoder
from schemas.errors import HeadraceError
from schemas.events import Event, PayloadStored
from schemas.payloads import PayloadUnreadable, stand_in
from schemas.reasons import Reason

AWAY_MAX_S = 300.0
"""How long a log that takes nothing, or an object store that is away, is tried before the job gives up; it can go on later."""
AWAY_POLL_S = 1.0


async def follow(decoder: EventDecoder, reference: PayloadStored) -> Event | None:
    """What is in the object store. A store that is away is waited for: the answer is there, and costs as much again.

    Raises HeadraceError (unavailable) after `AWAY_MAX_S`; the record is read again when the job goes on.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + AWAY_MAX_S
    while True:
        try:
            return await decoder.follow(reference)
        except PayloadUnreadable as lost:
            if lost.reason is not Reason.UNAVAILABLE:
                return stand_in(lost)
            if loop.time() > give_up_s:
                text = "the object store is away, and an answer is in it; run the same again to go on"
                raise HeadraceError(Reason.UNAVAILABLE, text) from lost
        await asyncio.sleep(AWAY_POLL_S)
