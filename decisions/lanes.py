"""What is parked: requests so far back in their tenant's line that no more than a stub of each is kept, and the record is read again later.

A lane is one tenant's requests for one version, in the order of the log. In front are those that are held with their whole record (the
turnstile has them), behind them those that are parked here. Stubs are called, to be read again, as their lane runs low, at their deadline, or
when nobody may ask for them any more. A stub is called once at a time, and ends once: when its record is here again (`arrived`), when
it is cancelled, or when its partition goes to another.

`Lanes` is the bookkeeping. It reads no clock and does no I/O.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from schemas.events import Reply

PARKED_MAX = 200_000
"""Stubs of one process. A partition that has more than its part of them isn't read on while there are so many."""
STALE_MAX = 1_024
"""So many stubs that are gone may lie about before a list is cleared of them, or as many as it has others."""

Place = tuple[str, str]
"""Model and version."""


class State(IntEnum):
    """Of a stub: it waits, it is being read again, or it is nobody's any more."""

    PARKED = 0
    CALLED = 1
    GONE = 2


@dataclass(slots=True, eq=False)
class Stub:
    """All that is kept of a parked request. There are hundreds of thousands, so each field counts.

    `size` is the bytes of its record. `done` says to the log that its record is handled. `handled`: its record is here again. `unwanted`: it was
    cancelled while it was being read. `twin` is another with the same id.
    """

    partition: int
    offset: int
    place: Place
    tenant: str
    key_id: str
    request_id: str
    reply: Reply
    deadline_ms: int
    size: int
    state: State = State.PARKED
    handled: bool = False
    unwanted: bool = False
    done: Callable[[], object] | None = None
    twin: Stub | None = None

    def __lt__(self, other: Stub) -> bool:
        return self.deadline_ms < other.deadline_ms


@dataclass(slots=True, eq=False)
class Lane:
    """`line` is in the order of the log, with some that are gone; `parked` and `called` count the others."""

    line: deque[Stub] = field(default_factory=deque)
    parked: int = 0
    called: int = 0


Wants = Callable[[Place, str, int, int], int]
"""Of a lane, by place, tenant, partition, and how many of it are being read: how many more records to have at hand."""


@dataclass(slots=True)
class Called:
    """Stubs whose records are to be read now: `most`, of so many bytes, and one at least."""

    most: int
    bytes_most: int
    stubs: list[Stub] = field(default_factory=list)
    bytes: int = 0

    @property
    def full(self) -> bool:
        """Whether no more are to be read."""
        return len(self.stubs) >= self.most or self.bytes >= self.bytes_most


class Lanes:
    """See the module."""

    def __init__(self) -> None:
        """Nothing is parked."""
        self._lanes: OrderedDict[tuple[Place, str], Lane] = OrderedDict()
        self._at: dict[tuple[int, int], Stub] = {}
        self._ids: dict[str, Stub] = {}
        self._deadlines: list[Stub] = []
        self._urgent: deque[Stub] = deque()
        self._of_partition: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._at)

    # --- coming and going ----------------------------------------------------------------------------------------------

    def park(self, stub: Stub) -> None:
        """Behind all others of its lane."""
        lane = self._lanes.setdefault((stub.place, stub.tenant), Lane())
        lane.line.append(stub)
        lane.parked += 1
        self._at[stub.partition, stub.offset] = stub
        stub.twin = self._ids.get(stub.request_id)
        self._ids[stub.request_id] = stub
        heapq.heappush(self._deadlines, stub)
        self._of_partition[stub.partition] += 1

    def call(self, wants: Wants, now_ms: int, most: int, bytes_most: int) -> list[Stub]:
        """To be read again now: first who must hear something, then of each lane in turn as many as it wants."""
        called = Called(most, bytes_most)
        while self._urgent and not called.full:
            self._take(self._urgent.popleft(), called)
        while self._deadlines and not called.full and self._deadlines[0].deadline_ms <= now_ms:
            self._take(heapq.heappop(self._deadlines), called)
        for key in list(self._lanes):
            if called.full:
                break
            if self._call_next(key, self._lanes[key], wants, called):
                self._lanes.move_to_end(key)
        return called.stubs

    def _call_next(self, key: tuple[Place, str], lane: Lane, wants: Wants, called: Called) -> bool:
        """The first of a lane; whether there were any."""
        _clear(lane.line, lane.parked)
        if not lane.parked:
            return False
        until = len(called.stubs) + wants(*key, lane.line[0].partition, lane.called)
        before = len(called.stubs)
        while lane.line and not called.full and len(called.stubs) < until:
            self._take(lane.line.popleft(), called)
        return len(called.stubs) > before

    def _take(self, stub: Stub, called: Called) -> None:
        if stub.state is State.PARKED:
            stub.state = State.CALLED
            lane = self._lanes[stub.place, stub.tenant]
            lane.parked -= 1
            lane.called += 1
            called.stubs.append(stub)
            called.bytes += stub.size

    def arrived(self, partition: int, offset: int) -> Stub | None:
        """The record at a place is here again, or needn't be: its stub, which ends with that; None if none was called there."""
        stub = self._at.get((partition, offset))
        if stub is None or stub.state is not State.CALLED:
            return None
        self._end(stub)
        return stub

    def end(self, stub: Stub) -> None:
        """What was called is done with, whether its record arrived or not."""
        if stub.state is State.CALLED:
            self._end(stub)

    def unread(self, stubs: Iterable[Stub]) -> None:
        """These can't be read at present: each waits where it was in its lane again, whenever others of it came back."""
        back: dict[tuple[Place, str], list[Stub]] = {}
        for stub in stubs:
            if stub.state is State.CALLED:
                stub.state = State.PARKED
                back.setdefault((stub.place, stub.tenant), []).append(stub)
                heapq.heappush(self._deadlines, stub)
        for key, found in back.items():
            lane = self._lanes[key]
            lane.called -= len(found)
            lane.parked += len(found)
            last = max(stub.offset for stub in found)
            while lane.line and lane.line[0].offset < last:
                if (earlier := lane.line.popleft()).state is State.PARKED:
                    found.append(earlier)
            lane.line.extendleft(sorted(found, key=lambda stub: stub.offset, reverse=True))

    def cancel(self, tenant: str, request_id: str) -> list[Stub]:
        """A request isn't wanted any more. Those of its stubs that waited, which are gone now; one that is being read is marked."""
        ended = []
        for stub in self._twins(tenant, request_id):
            if stub.state is State.PARKED:
                self._end(stub)
                ended.append(stub)
            else:
                stub.unwanted = True
        return ended

    def drop(self, partitions: Collection[int]) -> None:
        """These are others' now, and what is parked of them comes again."""
        for stub in [stub for stub in self._at.values() if stub.partition in partitions]:
            self._end(stub)
        self._tidy()

    def _end(self, stub: Stub) -> None:
        lane = self._lanes[stub.place, stub.tenant]
        if stub.state is State.PARKED:
            lane.parked -= 1
        else:
            lane.called -= 1
        stub.state = State.GONE
        if not lane.parked and not lane.called:
            del self._lanes[stub.place, stub.tenant]
        del self._at[stub.partition, stub.offset]
        self._of_partition[stub.partition] -= 1
        self._unlink(stub)
        if len(self._deadlines) > 2 * len(self._at) + STALE_MAX:
            self._tidy()

    def _unlink(self, stub: Stub) -> None:
        first = self._ids[stub.request_id]
        if first is not stub:
            while first.twin is not stub:
                assert first.twin is not None
                first = first.twin
            first.twin = stub.twin
        elif stub.twin is not None:
            self._ids[stub.request_id] = stub.twin
        else:
            del self._ids[stub.request_id]
        stub.twin = None

    def _tidy(self) -> None:
        self._deadlines = [stub for stub in self._at.values() if stub.state is State.PARKED]
        heapq.heapify(self._deadlines)
        self._urgent = deque(stub for stub in self._urgent if stub.state is State.PARKED)

    # --- looking -------------------------------------------------------------------------------------------------------

    def hurry(self, tenant: str, dead: Callable[[Stub], bool]) -> None:
        """What nobody may ask of a tenant's any more is called before others, to hear so."""
        for (_, name), lane in self._lanes.items():
            if name == tenant:
                self._urgent.extend(stub for stub in lane.line if stub.state is State.PARKED and dead(stub))

    def find(self, tenant: str, request_id: str) -> Stub | None:
        """The first that has an id, if one is parked or being read, and wanted."""
        return next((stub for stub in reversed(self._twins(tenant, request_id)) if not stub.unwanted), None)

    def _twins(self, tenant: str, request_id: str) -> list[Stub]:
        found, stub = [], self._ids.get(request_id)
        while stub is not None:
            if stub.tenant == tenant:
                found.append(stub)
            stub = stub.twin
        return found

    def called_at(self, partition: int, offset: int) -> bool:
        """Whether a record was called, and not yet decided."""
        stub = self._at.get((partition, offset))
        return stub is not None and stub.state is State.CALLED

    def behind(self, place: Place, tenant: str) -> int:
        """How many of a lane are parked or being read."""
        lane = self._lanes.get((place, tenant))
        return lane.parked + lane.called if lane is not None else 0

    def called(self, place: Place, tenant: str) -> int:
        """How many of a lane are being read."""
        lane = self._lanes.get((place, tenant))
        return lane.called if lane is not None else 0

    def all(self) -> Iterable[Stub]:
        """Whatever is parked or being read."""
        return self._at.values()

    def tenants(self) -> set[str]:
        """Whose are parked."""
        return {tenant for _, tenant in self._lanes}

    def full(self, partition: int, partitions: int, most: int = PARKED_MAX) -> bool:
        """Whether a partition, of so many, has more parked than it may: none has while there is room in all."""
        return len(self._at) >= most and self._of_partition[partition] * max(1, partitions) >= most


def _clear(line: deque[Stub], parked: int) -> None:
    """Of what is gone, in front, and anywhere if there is much of it."""
    while line and line[0].state is not State.PARKED:
        line.popleft()
    if len(line) > 2 * parked + STALE_MAX:
        kept = [stub for stub in line if stub.state is State.PARKED]
        line.clear()
        line.extend(kept)
