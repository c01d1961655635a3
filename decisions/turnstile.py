"""Who may come into a pool's queue now, and who waits before it: so that no tenant's burst stands in front of others, and no batch fills a pool.

A worker chooses fairly among the records that its windows hold; behind them it sees nothing. So admission lets a tenant have only so many
requests there that nobody has begun: a quarter of all windows together, less with more than four tenants, and three quarters while it is
the only one. The rest wait in `requests.*`, each tenant's in the order in which they came. On tiers other than interactive nothing is let in
beyond what the windows hold: a million lines wait in `requests.batch`, and not before a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from decisions.placement import READY, STALE_MS, SeenWorker, backlogs
from decisions.window import window_records
from schemas.events import ModelVersionRegistered
from schemas.topics import INTERACTIVE, work_topic

TENANTS_MIN = 4
"""A tenant that isn't alone has at most this part of the windows, so that others always find room."""
WINDOW_RECORDS = 64
"""What a worker looks at that doesn't say."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one version on one tier: the records that their windows hold, and those there that aren't finished."""

    window: int
    backlog: int


def pool(
    version: ModelVersionRegistered,
    tier: str,
    workers: Iterable[SeenWorker],
    ends: Mapping[tuple[str, int], int],
    now_ms: int,
    stale_ms: int = STALE_MS,
) -> Pool:
    """As seen now; parameters as those of `placement.place`. Without a worker it is as large as that of the one which will be
    first and have all partitions, and only what each tenant has there counts: nobody tells what of the topic is finished.
    """
    topic = work_topic(version.model, version.version, tier)
    window, backlog = 0, 0
    for seen in workers:
        if seen.report.state != READY or now_ms - seen.seen_ms > stale_ms:
            continue
        held = backlogs(seen.report, topic, ends)
        window += len(held) * (seen.report.window_records or window_records(WINDOW_RECORDS, seen.report.slots))
        backlog += sum(held.values())
    return (
        Pool(window, backlog) if window else Pool(version.partitions * window_records(WINDOW_RECORDS, version.slots), 0)
    )


def share(window: int, tenants: int, percent: int = 0) -> int:
    """How many requests that nobody has begun a tenant may have in the windows beside so many tenants, itself included.

    Who is promised `percent` of the pool has that part at least.
    """
    part = 3 * window // 4 if tenants <= 1 else window // max(TENANTS_MIN, tenants)
    return max(1, part, window * percent // 100)


def opens(tier: str, seen: Pool, queued: int, tenants: int, percent: int = 0) -> bool:
    """Whether a tenant that has `queued` requests there which nobody has begun may have one more."""
    if queued >= share(seen.window, tenants, percent):
        return False
    return tier == INTERACTIVE or seen.backlog < seen.window
