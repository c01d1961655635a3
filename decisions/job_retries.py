"""What an error of a batch job's request leads to: its last word, another try, its lines one by one, or the job's stop.

Nothing here reads a clock, draws at random or does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from decisions.jobs import TRIES_MAX, Tries
from schemas.reasons import Reason

REFUSED_MAX = 200
FAILED_MAX = 3
BACKOFF_S, BACKOFF_MAX_S = 0.5, 60.0

_GRANT = (Reason.GRANT_EXPIRED, Reason.INVALID_GRANT, Reason.INVALID_API_KEY, Reason.PERMISSION_DENIED)
_REFUSED = (Reason.OVERLOADED, Reason.NO_WORKER, Reason.UNAVAILABLE)
_LAST = (Reason.DEADLINE_EXCEEDED, Reason.TIME_LIMIT_EXCEEDED)
"""Reasons that may pass, but that no line waits for twice in one run. Of lines together each is asked by itself first: they had one deadline."""
_ALL_ALIKE = (Reason.MODEL_NOT_FOUND, Reason.CANCELLED)
"""Reasons that a unit's lines have in common."""


class Then(Enum):
    """What follows."""

    LAST = "last"
    """The error is the answer."""
    AGAIN = "again"
    SPLIT = "split"
    """Each of the unit's lines is asked by itself."""
    STOP = "stop"
    """Asked again once the job goes on with a grant that holds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows, in `wait_s`; so long nothing new of the job is asked: `all_wait_s`. `refused` and `failed` are added to its tries."""

    then: Then
    wait_s: float = 0.0
    all_wait_s: float = 0.0
    refused: int = 0
    failed: int = 0


def verdict(reason: Reason, retry_after_ms: int | None, tries: Tries, lines: int) -> Verdict:
    """Of an error of a request of so many lines, after these tries.

    A limit that will have room says when (`retry_after_ms`): such a wait is no failed try. One that doesn't never will, for a request as large as this.
    """
    again = tries.asked < TRIES_MAX - 1
    if reason in _GRANT and again:
        return Verdict(Then.STOP)
    may_pass = (
        reason.retriable and reason not in _LAST and (reason is not Reason.RATE_LIMITED or retry_after_ms is not None)
    )
    if not may_pass:
        return Verdict(Then.SPLIT if lines > 1 and reason not in (*_ALL_ALIKE, *_GRANT) else Then.LAST)
    if reason is Reason.RATE_LIMITED:
        room_s = (retry_after_ms or 0) / 1000
        return Verdict(Then.AGAIN, max(room_s, _backoff_s(tries.asked)), room_s) if again else Verdict(Then.LAST)
    if reason in _REFUSED:
        wait_s = _backoff_s(tries.refused)
        return Verdict(Then.AGAIN, wait_s, wait_s, 1) if again and tries.refused < REFUSED_MAX else Verdict(Then.LAST)
    wait_s = _backoff_s(tries.failed)
    return Verdict(Then.AGAIN, wait_s, 0.0, 0, 1) if again and tries.failed < FAILED_MAX else Verdict(Then.LAST)


def _backoff_s(count: int) -> float:
    return min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(count, 10))
