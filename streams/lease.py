"""Until when a member's partitions are surely its own. What it lets in under a limit counts only if the log has it by then.

The group gives a partition to nobody else before a session has passed since the member's last heartbeat. A process that is frozen, or whose
broker is, can wake up and write what it decided long ago, when another has decided the same anew. So an admission says until when it is
valid, and the fold of the ledgers passes over one that the broker took later; the process that wrote it sees that in the broker's answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SURE_SHARE = 0.6
"""Of a session; the rest is for clocks that differ, and for what is on its way."""


def _now_ms() -> int:
    return int(time.time() * 1000)


class Lease:
    """Renewed by each heartbeat that the coordinator answered, from the moment it was sent."""

    def __init__(self, session_timeout_ms: int, now_ms: Callable[[], int] = _now_ms) -> None:
        self._session_ms = session_timeout_ms
        self._sure_ms = int(session_timeout_ms * SURE_SHARE)
        self._now_ms = now_ms
        self._proved_ms = 0
        self._ahead_ms = 0

    @property
    def until_ms(self) -> int:
        """By the brokers' clocks, as far as they are known to be ahead of this one. In ms since 1970."""
        return self._proved_ms + self._sure_ms + self._ahead_ms

    @property
    def holds(self) -> bool:
        """Whether it does now."""
        return self._now_ms() < self._proved_ms + self._sure_ms

    @property
    def left_s(self) -> float:
        """How long what was let in by now may still come to count: a whole session, for the brokers' clocks may be behind."""
        return max(0.0, (self._proved_ms + self._session_ms - self._now_ms()) / 1000)

    def proved(self, since_ms: int | None = None) -> None:
        """The coordinator answered what was sent at that moment, or has just given partitions."""
        self._proved_ms = max(self._proved_ms, self._now_ms() if since_ms is None else since_ms)

    def heard(self, broker_ms: int) -> None:
        """A broker has just taken a record, at this time by its own clock."""
        self._ahead_ms = max(0, broker_ms - self._now_ms())

    def watch(self, coordinator: Any) -> None:
        """Hear of an aiokafka group coordinator's heartbeats. Calling it again changes nothing."""
        if getattr(coordinator, "_lease", None) is self:
            return
        beat = coordinator._do_heartbeat  # noqa: SLF001  # aiokafka tells nobody

        async def beating() -> bool:
            sent_ms = self._now_ms()
            answered: bool = await beat()
            if answered:
                self.proved(sent_ms)
            return answered

        coordinator._do_heartbeat, coordinator._lease = beating, self  # noqa: SLF001
