"""The work window: what a worker may look at, which record it runs next, and what it may commit.

A worker looks at most `records` offsets past the last commit that the broker confirmed, so whoever owns the partition next knows
which records may have been started: those and no others. It commits only below the lowest record that isn't finished. All workers of
a model version must use the same number of records; `window_records` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from schemas.topics import TIERS

WINDOW_SLOTS_FACTOR = 2
"""A window holds at least this many times a worker's slots, so that finished records above the lowest open one don't idle it."""


@dataclass(frozen=True, slots=True)
class Window:
    """One partition's window. Offsets that the log skips (compaction, aborted transactions) count as finished.

    Attributes:
        committed: the offset of the last commit that the broker confirmed; the first offset there is, before the first commit.
        next: the offset to take next.
        open: the offsets taken and not finished, and the bytes of each record.
    """

    committed: int
    next: int
    open: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def at(cls, committed: int) -> Window:
        """The empty window of a partition that was just assigned."""
        return cls(committed, committed)

    @property
    def committable(self) -> int:
        """The highest offset that may be committed: everything below it is finished."""
        return min(self.open, default=self.next)

    @property
    def finished_above(self) -> int:
        """Records finished above the last confirmed commit."""
        return self.next - self.committed - len(self.open)

    @property
    def bytes(self) -> int:
        """Bytes of the records taken and not finished."""
        return sum(self.open.values())


def window_records(configured: int, slots: int) -> int:
    """How many records a window spans: the configured number, or more if the model version's slots need it."""
    return max(configured, WINDOW_SLOTS_FACTOR * slots, 1)


def room(window: Window, records: int, max_bytes: int) -> int:
    """How many more records may be taken: 0 once the window spans `records` or holds `max_bytes`."""
    if window.open and window.bytes >= max_bytes:
        return 0
    return max(0, window.committed + records - window.next)


def take(window: Window, offset: int, size: int) -> Window:
    """The window with one more record. Raises ValueError for an offset that was taken before."""
    if offset < window.next:
        raise ValueError(f"offset {offset} was taken before; {window.next} is next")
    return replace(window, next=offset + 1, open={**window.open, offset: size})


def finish(window: Window, offset: int) -> Window:
    """The window once all that a record caused is confirmed by the broker. Finishing twice changes nothing."""
    if offset not in window.open:
        return window
    return replace(window, open={key: size for key, size in window.open.items() if key != offset})


def confirm(window: Window, offset: int) -> Window:
    """The window once the broker has confirmed a commit. An older one changes nothing."""
    if offset > window.committable:
        raise ValueError(f"offset {offset} is past {window.committable}, the lowest unfinished")
    return replace(window, committed=max(window.committed, offset))


# --- choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record that waits in a window for a slot."""

    tier: str
    tenant: str
    deadline_ms: int
    taken: int
    """The order in which the worker took it."""


def choose(waiting: Sequence[Waiting], running: Mapping[str, int]) -> int | None:
    """The index of the record to run next, or None if nothing waits.

    The first tier in the order of `TIERS` that waits at all; of its records, one of the tenant that has the fewest running here
    (`running`, by tenant); of those, the one with the earliest deadline, then the one taken first.
    """
    if not waiting:
        return None

    def rank(index: int) -> tuple[int, int, int, int]:
        record = waiting[index]
        tier = TIERS.index(record.tier) if record.tier in TIERS else len(TIERS)
        return tier, running.get(record.tenant, 0), record.deadline_ms, record.taken

    return min(range(len(waiting)), key=rank)


def expired(waiting: Waiting, now_ms: int) -> bool:
    """Whether a record that nobody has started is past its deadline, so that it must not run."""
    return now_ms >= waiting.deadline_ms
