"""Tells `doors` that this front door is there, five times a second while it has calls open, so that admission knows whose callers may still listen."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import structlog

from infra.log import EventProducer
from schemas.events import FrontDoorSeen, InferenceRequested
from schemas.topics import DOORS

BEAT_S = 0.2
TOLD_S = 1.0
"""The log has so long to take a word."""
SPACING_S = 0.1
"""Whoever comes back is told of at once, but no sooner after the last word than this."""
QUIET_BEATS = 10
"""So often it is told when nothing is open any more: that others are silent meanwhile is known by it."""
ADOPTED_MAX = 16_384
"""So many streams are told of: more than a front door holds by its own limit, and fewer than a record takes."""
NAME_BYTES = 6

_log = structlog.get_logger(__name__)


class Presence:
    """Of one run of the process, which `door` names. `opened` says how many calls are open, `adopted` which requests' streams are read again."""

    def __init__(
        self,
        producer: EventProducer,
        opened: Callable[[], int],
        adopted: Callable[[], Collection[str]],
        *,
        beat_s: float = BEAT_S,
        spacing_s: float = SPACING_S,
    ) -> None:
        self.door = secrets.token_hex(NAME_BYTES)
        self._producer = producer
        self._opened = opened
        self._adopted = adopted
        self._beat_s, self._spacing_s = beat_s, spacing_s
        self._called = asyncio.Event()
        self._news = asyncio.Event()

    def watching(self, requests: Sequence[InferenceRequested], *, outlives: bool) -> Sequence[InferenceRequested]:
        """A new call's requests. Those that don't outlive their caller say who cancels them."""
        self._called.set()
        return requests if outlives else [replace(request, door=self.door) for request in requests]

    def adopting(self) -> None:
        """A caller has come back for a stream, perhaps one that was asked elsewhere."""
        self._called.set()
        self._news.set()

    async def run(self) -> None:
        """Tells until it is cancelled."""
        while True:
            await self._called.wait()
            self._called.clear()
            quiet = 0
            while quiet < QUIET_BEATS:
                self._news.clear()
                quiet = 0 if self._opened() else quiet + 1
                await self._tell()
                await asyncio.sleep(self._spacing_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._beat_s - self._spacing_s):
                        await self._news.wait()

    async def _tell(self) -> None:
        """Nobody waits for the log's word: what it doesn't take in time is old news."""
        event = FrontDoorSeen(self.door, tuple(sorted(self._adopted())[:ADOPTED_MAX]))
        try:
            async with asyncio.timeout(TOLD_S):
                await self._producer.send(DOORS, event, key=self.door)
        except Exception as error:  # whatever the client raises, the next word may be taken
            _log.warning("the log was not told that this front door is there", error=repr(error))
