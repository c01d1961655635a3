"""Dynamic batching: which of the waiting requests run together next, and how long what waits may wait for company.

Only equal signatures run together, at most `max_batch_size` rows at once. The one that is first in line decides whose turn it is: by
priority (lower first), then deadline, then arrival. Those in line after it with the same signature fill its batch, whatever their
priority, so that what nobody is in a hurry for goes along where there is room. A batch goes when it is as large as it can be or as is
preferred, else once its first has waited for `max_queue_delay_ms` or for half of the time that its deadline leaves it. Nothing of this
reads a clock: times are given, in milliseconds of any clock that doesn't go back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

MAX_BATCH_SIZE = 32
FEW = 64
"""So many leave a line one by one; of more, what stays is written anew."""
PARTS_MAX = 4_096
"""Parts of one request, at most: each is a place in the queue. What processors take has no more rows (`signature.BATCH_MAX`)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How requests are batched.

    Attributes:
        max_batch_size: rows that run at once, at most; 1 batches nothing.
        max_queue_delay_ms: how long a request waits for company while an instance is idle.
        preferred_batch_sizes: rows with which a batch goes at once, besides the most there may be.
    """

    max_batch_size: int = MAX_BATCH_SIZE
    max_queue_delay_ms: float = 0
    preferred_batch_sizes: tuple[int, ...] = ()

    @property
    def targets(self) -> tuple[int, ...]:
        """The sizes worth going at once with, largest first."""
        fitting = {size for size in self.preferred_batch_sizes if 0 < size <= self.max_batch_size}
        return tuple(sorted({*fitting, self.max_batch_size}, reverse=True))


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows of one request that wait to run together.

    Attributes:
        number: names them, and grows with arrival.
        signature: what must be equal of those that run together.
        rows: how many there are; from 1 to `max_batch_size`.
        arrived_ms: since when they wait.
        deadline_ms: when they must have begun.
        priority: lower goes first.
    """

    number: int
    signature: Hashable
    rows: int
    arrived_ms: float
    deadline_ms: float
    priority: int = 0


class _Rank(NamedTuple):
    priority: int
    deadline_ms: float
    number: int


@dataclass(slots=True)
class _Line:
    """Those of one signature, and for each until when it may wait for company.

    Attributes:
        ranks: a list in the order of their turns.
        rows: of all of them.
        dues: a heap of (time in ms, number), in which those that left stay until they are first.
    """

    ranks: list[_Rank] = field(default_factory=list)
    rows: int = 0
    dues: list[tuple[float, int]] = field(default_factory=list)


class Queue:
    """What waits. Mutable; each call takes time in proportion to what it tells, and to the number of signatures that wait."""

    def __init__(self, limits: Limits) -> None:
        """Empty."""
        self._limits = limits
        self._targets = limits.targets
        self._waiting: dict[int, Waiting] = {}
        self._lines: dict[Hashable, _Line] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap, in which those that left stay until they are first

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        """Takes one more. Raises ValueError for a number that is there, and for rows that no batch could hold."""
        if waiting.number in self._waiting:
            raise ValueError(f"{waiting.number} waits already")
        if not 1 <= waiting.rows <= self._limits.max_batch_size:
            raise ValueError(f"{waiting.rows} rows can't run at once; from 1 to {self._limits.max_batch_size} can")
        self._waiting[waiting.number] = waiting
        line = self._lines.setdefault(waiting.signature, _Line())
        insort(line.ranks, _rank(waiting))
        heappush(self._deadlines, (waiting.deadline_ms, waiting.number))
        heappush(line.dues, (self.due_ms(waiting), waiting.number))
        line.rows += waiting.rows

    def remove(self, number: int) -> Waiting | None:
        """Takes one out that needn't run any more; None if it doesn't wait."""
        return next(iter(self.remove_all([number])), None)

    def remove_all(self, numbers: Iterable[int]) -> list[Waiting]:
        """Takes out those of them that wait, and tells which they were."""
        found = [self._waiting[number] for number in dict.fromkeys(numbers) if number in self._waiting]
        self._take(found)
        return found

    def expired(self, now_ms: float) -> list[Waiting]:
        """Takes out those whose deadline has come, the earliest first: they never run."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            if (waiting := self._waiting.get(heappop(self._deadlines)[1])) is not None:
                late.append(waiting)
        self._take(late)
        return late

    def first_deadline_ms(self) -> float | None:
        """The earliest deadline of those that wait, or None."""
        return self._first(self._deadlines)

    def next_batch(self, now_ms: float) -> list[Waiting]:
        """Takes out those that an idle instance runs now, in the order of their turns; none if all may wait for company."""
        best: list[Waiting] = []
        best_rank: _Rank | None = None
        for line in self._lines.values():
            if best_rank is not None and line.ranks[0] > best_rank:
                continue
            if batch := self._ready(line, now_ms):
                best, best_rank = batch, line.ranks[0]
        self._take(best)
        return best

    def wake_ms(self) -> float | None:
        """When an idle instance has something to run if nothing more comes, or None."""
        dues = [self._first(line.dues) for line in self._lines.values()]
        return min((due for due in dues if due is not None), default=None)

    def due_ms(self, waiting: Waiting) -> float:
        """Until when it may wait for company."""
        patience_ms = min(self._limits.max_queue_delay_ms, (waiting.deadline_ms - waiting.arrived_ms) / 2)
        return waiting.arrived_ms + max(0.0, patience_ms)

    def _ready(self, line: _Line, now_ms: float) -> list[Waiting]:
        """The batch that a line gives now: the largest that is worth going at once, else what there is if one has waited enough.

        Its first is in it: where that has more rows than a size that is preferred, no batch of that size passes it by.
        """
        due_ms = self._first(line.dues)
        due = due_ms is not None and due_ms <= now_ms
        for target in self._targets:
            if line.rows >= target:
                batch, rows = self._fill(line, target)
                passed = not batch or batch[0].number != line.ranks[0].number
                if not passed and target in {rows, self._limits.max_batch_size}:
                    return batch
        return self._fill(line, self._limits.max_batch_size)[0] if due else []

    def _fill(self, line: _Line, target: int) -> tuple[list[Waiting], int]:
        """The first in line that has room, and after it all that fit as well."""
        batch: list[Waiting] = []
        rows = 0
        for rank in line.ranks:
            waiting = self._waiting[rank.number]
            if rows + waiting.rows <= target:
                batch.append(waiting)
                rows += waiting.rows
                if rows == target:
                    break
        return batch, rows

    def _first(self, heap: list[tuple[float, int]]) -> float | None:
        """The earliest time in a heap of those that wait, or None."""
        while heap and heap[0][1] not in self._waiting:
            heappop(heap)
        return heap[0][0] if heap else None

    def _take(self, taken: Iterable[Waiting]) -> None:
        leaving: dict[Hashable, list[Waiting]] = {}
        for waiting in taken:
            del self._waiting[waiting.number]
            leaving.setdefault(waiting.signature, []).append(waiting)
        for signature, left in leaving.items():
            line = self._lines[signature]
            line.rows -= sum(waiting.rows for waiting in left)
            if len(left) == len(line.ranks):
                del self._lines[signature]
            elif len(left) <= FEW:
                for waiting in left:
                    del line.ranks[bisect_left(line.ranks, _rank(waiting))]
            else:
                line.ranks = [rank for rank in line.ranks if rank.number in self._waiting]
            self._tidy(line.dues, len(line.ranks))
        self._tidy(self._deadlines, len(self._waiting))

    def _tidy(self, heap: list[tuple[float, int]], count: int) -> None:
        """Forgets those that left once they are more than those that wait: time may be long in coming to them."""
        if len(heap) > 2 * count + FEW:
            heap[:] = [entry for entry in heap if entry[1] in self._waiting]
            heapify(heap)


def too_many(rows: int, max_batch_size: int) -> str | None:
    """Why so many rows of one request can't be cut into parts, in words for the caller, or None."""
    if rows <= (most := PARTS_MAX * max_batch_size):
        return None
    return f"{rows} rows are given; at most {most} are taken at once: send the rest in other requests"


def slices(rows: int, limit: int) -> list[tuple[int, int]]:
    """Where to cut a request of so many rows so that each part fits: pairs of first row and row after the last, in order."""
    return [(at, min(at + limit, rows)) for at in range(0, rows, limit)]


def _rank(waiting: Waiting) -> _Rank:
    return _Rank(waiting.priority, waiting.deadline_ms, waiting.number)
