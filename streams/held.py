"""What is held back of one tier, with its whole record: in lanes, each tenant's for one version in the order of the log, and by id."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from decisions.accounts import Accounts
from decisions.cases import Case
from infra import metrics

Version = tuple[str, str]


@dataclass(eq=False)
class Held:
    """A request that waits for its turn, and the bytes of its record."""

    case: Case
    accounts: Accounts
    size: int
    turn: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def place(self) -> Version:
        """Where it goes."""
        return self.case.routed.model, self.case.routed.version

    def end(self, goes_on: bool) -> None:
        """It waits no longer; only the first time says whether it goes on."""
        if not self.turn.done():
            self.turn.set_result(goes_on)


class HeldBack:
    """The bookkeeping. One whose turn came is in no lane any more, and counts until it is removed."""

    def __init__(self, tier: str) -> None:
        """Nothing is held."""
        self._tier = tier
        self._lanes: dict[Version, OrderedDict[str, deque[Held]]] = {}
        self._by_id: dict[tuple[str, str], Held] = {}
        self._of_partition: Counter[int] = Counter()
        self._bytes_of_partition: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, held: Held) -> None:
        """Into its lane, where its record's offset says."""
        case, partition = held.case, held.case.source.partition
        lane = self._lanes.setdefault(held.place, OrderedDict()).setdefault(case.grant.tenant, deque())
        before = len(lane)
        while before and lane[before - 1].case.source.offset > case.source.offset:
            before -= 1  # what was read again may come in another order
        lane.insert(before, held)
        self._by_id[case.grant.tenant, case.request.request_id] = held
        self._of_partition[partition] += 1
        self._bytes_of_partition[partition] += held.size
        metrics.HELD_BACK.labels(self._tier).set(len(self._by_id))

    def remove(self, held: Held) -> None:
        """It is held no more, whatever becomes of it."""
        case, place, partition = held.case, held.place, held.case.source.partition
        tenant = case.grant.tenant
        lanes = self._lanes.get(place, OrderedDict())
        if held in (lane := lanes.get(tenant, deque())):
            lane.remove(held)
        if not lane:
            lanes.pop(tenant, None)
        if not lanes:
            self._lanes.pop(place, None)
        self._by_id.pop((tenant, case.request.request_id), None)
        self._of_partition[partition] -= 1
        self._bytes_of_partition[partition] -= held.size
        metrics.HELD_BACK.labels(self._tier).set(len(self._by_id))

    def first(self, place: Version, tenant: str) -> Held | None:
        """Whose turn is next in a lane; one that nothing waits in is gone."""
        lanes = self._lanes.get(place, OrderedDict())
        lane = lanes.get(tenant, deque())
        while lane and lane[0].turn.done():
            lane.popleft()
        if lane:
            return lane[0]
        lanes.pop(tenant, None)
        if not lanes:
            self._lanes.pop(place, None)
        return None

    def go_on(self, held: Held) -> None:
        """The first of a lane has its turn, and its lane comes behind those of others."""
        lanes, tenant = self._lanes[held.place], held.case.grant.tenant
        lanes[tenant].popleft()
        lanes.move_to_end(tenant)
        held.end(True)

    def find(self, tenant: str, request_id: str) -> Held | None:
        """What is held with an id and goes on waiting."""
        held = self._by_id.get((tenant, request_id))
        return None if held is None or held.turn.done() else held

    def all(self) -> list[Held]:
        """Whatever is held, as of now."""
        return list(self._by_id.values())

    def places(self) -> list[Version]:
        """Where any wait, as of now."""
        return list(self._lanes)

    def tenants(self, place: Version) -> Collection[str]:
        """Whose wait there, whose turn it is first."""
        return self._lanes.get(place, OrderedDict()).keys()

    def waiting(self) -> Iterator[str]:
        """The tenants that have any, some of them several times."""
        return (tenant for lanes in self._lanes.values() for tenant in lanes)

    def count(self, place: Version, tenant: str) -> int:
        """How many of a lane."""
        return len(self._lanes.get(place, OrderedDict()).get(tenant, ()))

    def of_partition(self, partition: int) -> int:
        """How many of a partition."""
        return self._of_partition[partition]

    def bytes_of(self, partition: int) -> int:
        """How much memory those of a partition take."""
        return self._bytes_of_partition[partition]

    @property
    def bytes(self) -> int:
        """How much all take."""
        return sum(self._bytes_of_partition.values())
