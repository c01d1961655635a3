"""The work window: what a worker may look at, which record it runs next and beside what, and what it may commit.

A worker looks at most `records` offsets past the last commit that the broker confirmed, so whoever owns the partition next knows
which records may have been started: those and no others. It commits only below the lowest record that isn't finished. All workers of
a model version must use the same number of records; `window_records` gives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeVar

from decisions.capacity import has_room
from schemas.topics import INTERACTIVE, TIERS

T = TypeVar("T")
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
    return Window(window.committed, offset + 1, {**window.open, offset: size})


def pass_over(window: Window, below: int) -> Window:
    """The window once all records below this offset were taken, or can't be read."""
    return replace(window, next=max(window.next, below))


def finish(window: Window, offset: int) -> Window:
    """The window once all that a record caused is confirmed by the broker. Finishing twice changes nothing."""
    if offset not in window.open:
        return window
    return Window(window.committed, window.next, {key: size for key, size in window.open.items() if key != offset})


def confirm(window: Window, offset: int) -> Window:
    """The window once the broker has confirmed a commit. An older one changes nothing."""
    if offset > window.committable:
        raise ValueError(f"offset {offset} is past {window.committable}, the lowest unfinished")
    return replace(window, committed=max(window.committed, offset))


# --- choosing --------------------------------------------------------------------------------------------------------

PASSED_MAX = 256
"""So many records that a worker takes after a suspect may begin before it, being of a higher tier; then it is the suspect's turn."""


class Standing(IntEnum):
    """What a record's stream says of it, in the order in which records of one tier begin.

    Who is in mid-answer waits for every token, so that record goes before fresh ones. Suspects are few: only what ran on workers that
    died. They come after what may run beside others, since that goes on all at once, and then they go one by one.
    """

    BEGUN = 0
    """Somebody has begun it."""
    SUSPECT = 1
    """It has been there when workers died, so often that one more time ends it: it runs alone, so that only its own fault can."""
    FRESH = 2
    """Nobody has begun it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record that waits in a window for a slot, or has one."""

    tier: str
    tenant: str
    deadline_ms: int
    taken: int
    """The order in which the worker took it."""
    standing: Standing = Standing.FRESH
    slots: int = 1
    """The slots that it takes in time: one for each of its answers."""


INTERACTIVE_SLOTS_SHARE = 8
"""One slot in so many is used by interactive requests alone, where nothing else is said."""

GUESTS_SHARE = 8
"""One guest in so many slots."""

Owner = tuple[str, str]
"""Tier and tenant."""


@dataclass(frozen=True, slots=True)
class Room:
    """A worker's slots: all of them, those that only interactive requests use, and those promised to tenants of a tier.

    `guests` are some more, for interactive requests of tenants that have nothing running here: they wait for nobody's answer to end. `used` are
    the slots in use, of which one request may take several.
    """

    slots: int
    interactive: int = 0
    guests: int = 0
    used: int = 0
    guaranteed: Mapping[Owner, int] = field(default_factory=dict)


def interactive_slots(configured: int | None, slots: int, tiers: Sequence[str]) -> int:
    """Slots that a worker keeps for interactive requests: none if it serves no other tier, and never its only one."""
    if INTERACTIVE not in tiers or len(tiers) == 1:
        return 0
    wanted = max(1, slots // INTERACTIVE_SLOTS_SHARE) if configured is None else configured
    return min(wanted, slots - 1)


def guest_slots(slots: int) -> int:
    """Slots beyond the worker's own that newcomers find free. The engine must be made for so many more."""
    return slots // GUESTS_SHARE


def choose(waiting: Sequence[Waiting], running: Sequence[Waiting], room: Room | None = None) -> int | None:
    """The index of the record to begin now, or None if none may. Without a `room` only what runs beside it is judged.

    A record that nobody has begun leaves free what is kept for interactive requests, and what others are promised and don't use: with all
    the slots that it takes, or with its first one if its owner has none here.

    The first tier in the order of `TIERS` that waits at all; of its records, the first by `Standing`; of those, one of the tenant that
    has the fewest slots here in that tier; of those, the one with the earliest deadline, then the one taken first.

    A suspect begins when nothing else runs, and while it runs nothing else begins. Once it is its turn it holds the others back until
    what runs has ended. Records of a higher tier go before it, but only so many (`PASSED_MAX`): so none waits for ever.
    """
    if not waiting or Standing.SUSPECT in [record.standing for record in running]:
        return None
    fits = _fits(waiting, running, room)
    if not fits:
        return None
    shares = _slots((_owner(record), record) for record in running) if len(fits) > 1 else Counter[Owner]()

    def rank(index: int) -> tuple[int, Standing, int, int, int]:
        record = waiting[index]
        tier = TIERS.index(record.tier) if record.tier in TIERS else len(TIERS)
        return tier, record.standing, shares[_owner(record)], record.deadline_ms, record.taken

    best = min(fits, key=rank) if len(fits) > 1 else fits[0]
    suspects = [index for index in fits if waiting[index].standing is Standing.SUSPECT]
    oldest = min(suspects, key=lambda index: waiting[index].taken, default=best)
    if waiting[best].taken >= waiting[oldest].taken + PASSED_MAX:
        best = oldest
    return None if running and waiting[best].standing is Standing.SUSPECT else best


def _fits(waiting: Sequence[Waiting], running: Sequence[Waiting], room: Room | None) -> Sequence[int]:
    """The indices of those for whom there is a slot. Who was begun before has had one, and waits for no promise."""
    if room is None:
        return range(len(waiting))
    full = max(room.used, len(running)) >= room.slots
    if not (full or room.guaranteed) and all(record.tier == INTERACTIVE for record in waiting):
        return range(len(waiting))  # which takes no counting
    in_use = _slots((_owner(record), record) for record in running)
    others = sum(record.slots for record in running if record.tier != INTERACTIVE)
    left = room.slots - room.interactive - others
    may = dict[tuple[Owner, int], bool]()

    def fits(record: Waiting) -> bool:
        if full:
            return record.tier == INTERACTIVE and not in_use[_owner(record)]
        if record.standing is not Standing.FRESH:
            return True
        if record.tier != INTERACTIVE and left < (record.slots if others else 1):
            return False
        owner = _owner(record)
        wanted = record.slots if in_use[owner] else 1
        if (owner, wanted) not in may:
            may[owner, wanted] = not room.guaranteed or has_room(room.slots, room.guaranteed, in_use, owner, wanted)
        return may[owner, wanted]

    return [index for index, record in enumerate(waiting) if fits(record)]


def _owner(record: Waiting) -> Owner:
    """Who shares with others of the tier."""
    return record.tier, record.tenant


def _slots(records: Iterable[tuple[T, Waiting]]) -> Counter[T]:
    """The slots that records take, by what they are counted under."""
    counted: Counter[T] = Counter()
    for name, record in records:
        counted[name] += record.slots
    return counted


def expired(waiting: Waiting, now_ms: int) -> bool:
    """Whether a record that nobody has started is past its deadline, so that it must not run."""
    return now_ms >= waiting.deadline_ms
