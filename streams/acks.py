"""Acks of a partition's events strictly in their order, each when it and all before it are done.

Faust's own bookkeeping of acks loses records that are acked out of order (its `Consumer._new_offset` compares an offset with the committed one,
which is already the next to read, and takes any offset for the first of a new group).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Partition = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Open:
    """A partition's events that aren't acked, in their order, and how many of them are parked."""

    taken: deque[Taken] = field(default_factory=deque)
    parked: int = 0


class Taken:
    """An event that isn't acked. Called when it is done: again, or once its partition is gone, that does nothing. There may be hundreds of thousands."""

    __slots__ = ("_ack", "_of", "_parked", "done")

    def __init__(self, of: _Open, ack: Callable[[], object]) -> None:
        self._of: _Open | None = of
        self._ack = ack
        self._parked = False
        self.done = False

    def __call__(self) -> None:
        """It is done."""
        if (of := self._of) is not None:
            self.park(False)
            self.done = True
            while of.taken and of.taken[0].done:
                of.taken.popleft().ack()

    def ack(self) -> None:
        """It and all before it are done."""
        self._of = None
        self._ack()

    def park(self, parked: bool) -> None:
        """It is parked now, or no longer."""
        if self._of is not None and self._parked is not parked:
            self._parked = parked
            self._of.parked += 1 if parked else -1

    @property
    def gone(self) -> bool:
        """Whether it is acked, or its partition gone."""
        return self._of is None

    def drop(self) -> None:
        """Its partition is gone."""
        self._of = None


class InOrderAcks:
    """Acks each partition's events in the order of their offsets, whatever the order in which they get done."""

    def __init__(self) -> None:
        self._open: dict[Partition, _Open] = {}

    def take(self, partition: Partition, ack: Callable[[], object]) -> Taken:
        """Note the partition's next event. Call what is returned when it is done."""
        of = self._open.setdefault(partition, _Open())
        taken = Taken(of, ack)
        of.taken.append(taken)
        return taken

    def drop(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions that were taken away: what is open there will be delivered again, here or elsewhere."""
        for partition in partitions:
            for taken in self._open.pop(partition, _Open()).taken:
                taken.drop()

    @property
    def open(self) -> int:
        """How many events are taken and not acked."""
        return sum(len(of.taken) for of in self._open.values())

    def ahead(self, partition: Partition) -> int:
        """The same of one partition, without those that are parked."""
        of = self._open.get(partition)
        return len(of.taken) - of.parked if of is not None else 0
