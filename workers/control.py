"""What callers cancelled, read from `control` by every worker, from its beginning: a job that is still queued must not run either."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from infra.settings import KafkaSettings
from infra.views import View
from schemas.events import Event, InferenceCancelled
from schemas.topics import CONTROL
from workers.work import RequestKey

CANCELLED_MAX = 100_000
"""Cancelled requests remembered; the oldest are forgotten first. `control` keeps them for an hour."""


class Control:
    """Follows `control`. `on_cancel` is called for each cancelled request as it comes."""

    def __init__(self, settings: KafkaSettings, on_cancel: Callable[[RequestKey], None]) -> None:
        """Nothing is read before `start`."""
        self._on_cancel = on_cancel
        self._cancelled: OrderedDict[RequestKey, None] = OrderedDict()
        self._view = View(settings, CONTROL, self._apply)

    async def start(self) -> None:
        """Returns once everything cancelled so far is known."""
        await self._view.start()

    async def stop(self) -> None:
        """Stops following."""
        await self._view.stop()

    def is_cancelled(self, key: RequestKey) -> bool:
        """Whether the caller no longer wants the answer."""
        return key in self._cancelled

    def _apply(self, event: Event, _record: Any) -> None:
        if not isinstance(event, InferenceCancelled):
            return
        key = RequestKey(event.tenant, event.request_id)
        self._cancelled[key] = None
        while len(self._cancelled) > CANCELLED_MAX:
            self._cancelled.popitem(last=False)
        self._on_cancel(key)
