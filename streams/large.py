"""Requests that are in the object store: which references are followed, how long, and how many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from decisions.cases import Refusal
from infra.log import EventDecoder
from schemas.errors import Undecodable
from schemas.events import InferenceRequested, PayloadStored
from schemas.payloads import PayloadUnreadable, outline_of, refusal
from schemas.reasons import Reason

READ_WAIT_S = 20.0
"""How long a large request may take to be read, its turn included."""
READ_WAIT_MIN_S = 5.0
"""So long it may take once it is its turn, however late that comes."""
RETRY_AFTER_MS = 5_000
FETCHES_MAX = 4
"""Large requests that are fetched at once."""


class Unread(Exception):
    """The request isn't read, and its caller is told why. Never leaves this room."""

    def __init__(self, told: Refusal) -> None:
        super().__init__(told.message)
        self.refusal = told


class Claim:
    """Leave to fetch one more. `end` it once it is fetched, or won't be; doing so again changes nothing."""

    def __init__(self, large: Large) -> None:
        self._large: Large | None = large
        large.claimed += 1

    def end(self) -> None:
        """Others may fetch."""
        if self._large is not None:
            self._large.claimed -= 1
            self._large = None


class Large:
    """Few are fetched at once. What comes of them is bounded as for all requests, by their true size."""

    def __init__(self, decoder: EventDecoder, aside: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Whoever waits for its turn does so within `aside`: it takes none of the places of those who are decided."""
        self._decoder = decoder
        self._aside = aside
        self._room = asyncio.Semaphore(FETCHES_MAX)
        self.claimed = 0

    @property
    def busy(self) -> bool:
        """Whether one more would wait for its turn."""
        return self._room.locked() or self.claimed >= FETCHES_MAX

    async def read(self, reference: PayloadStored, tenant: str, wait_s: float = READ_WAIT_S) -> InferenceRequested:
        """The request that a caller of this tenant refers to, in so much time, its turn included. Raises `Unread`."""
        if (unfollowed := refusal(reference, tenant)) is not None:
            raise Unread(Refusal(unfollowed.reason, unfollowed.message, unfollowed.param))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        try:
            if self._room.locked():
                async with self._aside(), asyncio.timeout_at(until_s):
                    await self._room.acquire()
            else:
                await self._room.acquire()
        except TimeoutError:
            text = "Too many large requests are being read. Try again later."
            raise Unread(Refusal(Reason.OVERLOADED, text, retry_after_ms=RETRY_AFTER_MS)) from None
        try:
            return await self._read(
                reference, min(max(until_s, loop.time() + READ_WAIT_MIN_S), loop.time() + READ_WAIT_S)
            )
        finally:
            self._room.release()

    async def _read(self, reference: PayloadStored, until_s: float) -> InferenceRequested:
        try:
            async with asyncio.timeout_at(until_s):
                request = await self._decoder.follow(reference)
        except PayloadUnreadable as error:
            raise Unread(Refusal(error.reason, error.message)) from error
        except Undecodable as error:
            raise Unread(Refusal(Reason.INVALID_REQUEST, error.message, error.param)) from error
        except TimeoutError:
            raise Unread(Refusal(Reason.UNAVAILABLE, STORE_AWAY_TEXT)) from None
        assert isinstance(request, InferenceRequested), "a reference to anything else isn't followed"
        return request

    @staticmethod
    def known(reference: PayloadStored) -> InferenceRequested:
        """What is known of a request that isn't read."""
        outline = outline_of(reference)
        return outline if isinstance(outline, InferenceRequested) else InferenceRequested(reference.request_id, "")


STORE_AWAY_TEXT = "The object store can't be reached at present."
