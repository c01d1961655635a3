"""What can't be done at present is tried again for a while; meanwhile it takes no place among the records that are handled."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext

from schemas.events import InferenceAdmitted
from streams.accounts import Ledgers
from streams.faust_shell import LeftUndone
from streams.turnstile import Turnstile

RETRY_S, RETRIED_S = 1.0, 300.0
"""How often, and for how long: a partition's commits wait for it."""


class Patience:
    """How one tier's admission waits."""

    def __init__(self, ledgers: Ledgers, turnstile: Turnstile) -> None:
        self._ledgers = ledgers
        self._turnstile = turnstile

    def aside(self) -> AbstractAsyncContextManager[None]:
        """For whoever waits for another to be decided: that one may be held back for long."""
        reading = self._turnstile.reading
        return reading.aside() if reading is not None else nullcontext()

    async def a_while(self, partition: int) -> None:
        """Before the next try. Raises LeftUndone if the partition goes meanwhile."""
        async with self.aside():
            await asyncio.sleep(RETRY_S)
        if await self._ledgers.of(partition) is None:
            raise LeftUndone


def over(verdict: InferenceAdmitted, until_s: float) -> bool:
    """Whether what was let in has been tried again for long enough: if its work isn't out, it hears at its deadline."""
    return time.monotonic() > until_s or time.time() * 1000 > verdict.deadline_ms
