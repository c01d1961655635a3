"""What a request has before it: how many wait already, and how long until its turn comes. Who can't be served in time is told at once.

Workers report what they had committed and finished, and how long a request runs in one of their slots, on the average. What is in the log
above that waits or runs. The wait of a request that comes now to a worker of `slots` slots, all of them taken, is

    (records there - slots + 1) * time of one / slots

for so many must end before its turn, and `slots` of them end in that time. What has ended since the report counts as gone. Placement gives it to the worker with the least to do, so the
shortest wait of all workers is its own. It is an estimate: where nothing was measured yet there is none, and nobody is refused by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from decisions.placement import READY, STALE_MS, SeenWorker, total

STARTING = "starting"
SILENT_REPORTS = 3
"""So many times longer than for placement a worker is believed to live, when it would be said that there is none: the log may have been away."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """`waiting`: records in no slot yet. `wait_ms`: until the turn of one that comes now; None if nothing tells. `ready`: workers that are.
    `per_ms`: requests that end in a millisecond, of all workers that tell; 0 if none does. `free`: slots for one that comes now.
    """

    ready: int
    waiting: int
    wait_ms: int | None
    per_ms: float = 0.0
    free: int = 0

    def begun_ms(self, count: int) -> int | None:
        """How long until so many of those that wait have a slot, about; None if nothing tells. Without a worker, until there is one."""
        if not self.ready:
            return self.wait_ms
        return math.ceil(count / self.per_ms) if self.per_ms > 0 else None

    @property
    def detail(self) -> str:
        """For the record of the decision."""
        wait = "not known" if self.wait_ms is None else f"{self.wait_ms} ms"
        return f"{self.ready} workers ready, {self.waiting} waiting, predicted wait {wait}"


def outlook(
    topic: str,
    workers: Iterable[SeenWorker],
    ends: Mapping[tuple[str, int], int],
    now_ms: int,
    start_up_ms: int | None,
    stale_ms: int = STALE_MS,
    ahead: int = 0,
) -> Outlook:
    """Of a work topic. Parameters as those of `placement.place`; `start_up_ms` is how long a worker of this version took to be ready, if known.
    `ahead` are others that will be there before it and aren't yet: they have the free slots, and for the wait they are shared out evenly among the
    workers.

    Without a worker that is ready the wait is that of the one that will be first; with none that starts, the start of a new one.
    """
    known = list(workers)
    seen = [each for each in known if now_ms - each.seen_ms <= stale_ms]
    ready = [each for each in seen if each.report.state == READY]
    if not ready:
        if any(each.report.state == READY and now_ms - each.seen_ms <= SILENT_REPORTS * stale_ms for each in known):
            return Outlook(0, 0, None)
        begun = [each.report.started_ms for each in seen if each.report.state == STARTING]
        left_ms = None if start_up_ms is None else max(0, min(begun, default=now_ms) + start_up_ms - now_ms)
        return Outlook(0, 0, left_ms)
    waiting, free, waits, per_ms = 0, 0, [], 0.0
    each_ahead = -(-ahead // len(ready))
    for each in ready:
        report, slots = each.report, max(1, each.report.slots)
        per_ms += slots / report.service_ms if report.service_ms > 0 else 0.0
        gone = int(max(0, now_ms - each.seen_ms) * slots / report.service_ms) if report.service_ms > 0 else 0
        over = max(report.running, total(report, topic, ends) - gone) - slots
        waiting += max(0, over)
        free += max(0, -over)
        over += each_ahead
        if over < 0:
            waits.append(0)
        elif report.service_ms > 0:
            waits.append(math.ceil((over + 1) * report.service_ms / slots))
    waiting += max(0, ahead - free)
    return Outlook(len(ready), waiting, min(waits, default=None), per_ms, max(0, free - ahead))


def service_ms(workers: Iterable[SeenWorker], now_ms: int, stale_ms: int = STALE_MS) -> float:
    """How long a request runs, on average over the workers that are ready and tell it; 0 if none does."""
    told = [
        each.report.service_ms
        for each in workers
        if each.report.state == READY and each.report.service_ms > 0 and now_ms - each.seen_ms <= stale_ms
    ]
    return sum(told) / len(told) if told else 0.0


def ended_ms(running: int, over: int, each_ms: float) -> int:
    """How long until `over` of so many requests have ended, about: they run for `each_ms`, and began at any moments."""
    return math.ceil(over * each_ms / running)
