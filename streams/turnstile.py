"""The turnstile acts: holds back, before anything is decided of them, the requests whose tenant has enough in the pool's queue.

Who is held back has no place among the records that are handled at once, and its record isn't acked: after a crash it comes again. It goes
on when its turn comes (`decisions.turnstile`), or is told at its deadline, or refused at once if its turn can't come before. Of tiers
other than interactive only some of a tenant's are held so; those behind them are parked (`streams.parking`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from decisions import admission as rules
from decisions import capacity, cases, places
from decisions import turnstile as turns
from decisions.accounts import Accounts
from decisions.cases import Case, Refusal
from decisions.places import Places
from decisions.queues import pool_name
from decisions.revocation import good_keys
from schemas.events import ModelVersionRegistered, Position, Reply, TenantChanged
from schemas.reasons import Reason
from schemas.topics import DAY_MS, INTERACTIVE, requests_topic
from streams.faust_shell import LeftUndone
from streams.held import Held, HeldBack, Version
from streams.large import Unread
from streams.parking import Parking
from streams.world import LiveWorld

LOOK_S = 0.02
FREE_MAX = 8
"""So few of one interactive tenant never wait: most requests cost no more than this comparison."""
HELD_MAX, HELD_OF_TENANT_MAX = 8_192, 2_048
"""Interactive requests held back: of all tenants, and of one. More are refused."""
HELD_BYTES_MAX = 256 * 1024 * 1024
HELD_OF_LANE_MAX, LOW_LANE, HELD_OF_PARTITION_MAX, FEW_HELD = 256, 128, 512, 32
"""Of other tiers so many are held of one tenant for one version; from `LOW_LANE` down more of what is parked is read again. Where a
partition has many that are held, no more than a few of each."""
HELD_OF_PARTITION_BYTES_MAX = 32 * 1024 * 1024
UNREAD = "", ""
"""The lane of what is in the object store and doesn't say for which model it is."""
FORCE_LOOK_S = 1.0
"""So often it is looked whether all that wait may still ask."""


class Reading(Protocol):
    """What the turnstile needs of whoever hands on records."""

    def aside(self) -> AbstractAsyncContextManager[None]:
        """While in it, the record that this task handles is none of those handled at once."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its turn: its model, its record's place, and where its caller hears."""

    model: str
    source: Position
    reply: Reply


class Turnstile:
    """One tier's. `enter` before a request is decided, `leave` once it counts in its ledger or is refused."""

    def __init__(self, world: LiveWorld, tier: str, stale_ms: int, parking: Parking | None = None) -> None:
        """Without `parking` all are held."""
        self._parking = parking
        self._world = world
        self._tier = tier
        self._topic = requests_topic(tier)
        self._stale_ms = stale_ms
        self.reading: Reading | None = None
        self._held = HeldBack(tier)
        self._inside: defaultdict[Version, Counter[str]] = defaultdict(Counter)
        self._places = Places()
        self._tenants: dict[str, TenantChanged | None] = {}
        self._looked_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    # --- a request ---------------------------------------------------------------------------------------------------

    async def enter(self, case: Case, accounts: Accounts, size: int) -> cases.Verdict:
        """Returns when it is a routed request's turn, or with why it has none. Raises LeftUndone if its partition goes first, Parked if its
        record is to be forgotten until then, Unwanted if it was cancelled.

        `size` is the bytes of its record. Unless it is refused, call `leave` when it counts in `accounts`, or doesn't come to that.
        """
        version = case.routed
        place, tenant = (version.model, version.version), case.grant.tenant
        if (called := self._called(case, place)) or self._places.has(case.source, place):
            case = replace(case, placed=True)
        if not self._waiting(place, tenant, called=called) and self._opens(place, version, tenant, accounts):
            self._count(place, case)
            self._take(place, case)
            return case, None
        dated = rules.check_deadline(replace(case, ahead=self._ahead(place, case, called=called)), self._world)
        assert isinstance(dated, Case)
        if self._parking is not None and not called and self._parked_before(case):
            self._look_after()
            raise self._parking.park(case, place, size, dated.deadline_ms)
        if (refusal := self._too_many(case, size)) is not None:
            return cases.refuse(case, "turn", refusal)
        if isinstance(late := rules.check_wait(dated, self._world), Refusal):
            return cases.refuse(case, "turn", late)
        if self._parking is not None and not called and self._far_back(place, tenant, case.source.partition):
            self._look_after()
            raise self._parking.park(case, place, size, dated.deadline_ms)
        return await self._wait(case, accounts, size, dated.deadline_ms)

    def _called(self, case: Case, place: Version) -> bool:
        """Whether a request was parked in this lane and has its turn at being held. Raises Unwanted."""
        if self._parking is None:
            return False
        stub = self._parking.lanes.arrived(case.source.partition, case.source.offset)
        if stub is not None and stub.unwanted:
            raise Unwanted
        return stub is not None and stub.place == place

    def _parked_before(self, case: Case) -> bool:
        """Whether another record with its id is parked: a refusal would end that one's stream."""
        assert self._parking is not None
        stub = self._parking.lanes.find(case.grant.tenant, case.request.request_id)
        return stub is not None and (stub.partition, stub.offset) != (case.source.partition, case.source.offset)

    def _waiting(self, place: Version, tenant: str, *, called: bool) -> int:
        """How many of a lane wait, before one that is `called` or comes now."""
        own = self._held.count(place, tenant)
        return own if called or self._parking is None else own + self._parking.lanes.behind(place, tenant)

    def _far_back(self, place: Version, tenant: str, partition: int) -> bool:
        """Whether one that comes now is only parked: its lane has others that are, or enough is held."""
        assert self._parking is not None
        return (
            self._parking.lanes.behind(place, tenant) > 0
            or self._held.of_partition(partition) >= HELD_OF_PARTITION_MAX
            or self.full(partition)
            or self._held.count(place, tenant) >= HELD_OF_LANE_MAX
        )

    def park_unread(self, case: Case, size: int, *, roomy: bool, first: bool) -> None:
        """A new request of `size` bytes, not read yet. Raises Parked if it had better wait so, but once only; Unread if it is refused.

        None is refused that isn't known to be the `first` with its id or key, for it may belong to what was asked before.
        """
        if self._parking is None:
            return
        source, version, lanes = case.source, self._world.stable(case.request.model), self._parking.lanes
        place, deadline_ms = UNREAD, case.requested_ms + (case.request.timeout_ms or DAY_MS)
        if version is not None and case.tier in version.tiers:
            place = version.model, version.version
            dated = rules.check_deadline(replace(case, version=version), self._world)
            assert isinstance(dated, Case)
            case, deadline_ms = dated, dated.deadline_ms
        if lanes.called_at(source.partition, source.offset) or (roomy and not lanes.behind(place, case.grant.tenant)):
            return
        if first and case.version is not None:
            lain = max(0, int(time.time() * 1000) - case.requested_ms)
            asked = replace(case, waited_ms=lain, ahead=self._ahead(place, case))
            if isinstance(late := rules.check_wait(asked, self._world), Refusal):
                raise Unread(late)
        self._look_after()
        raise self._parking.park(case, place, size, deadline_ms)

    def reserve(self, asked: Case) -> None:
        """A new request that isn't read yet takes its place, if there is one and the log says where: `give_back` when it is decided, or won't be."""
        source, version = asked.source, self._world.stable(asked.request.model)
        if version is None or (
            self._parking is not None and self._parking.lanes.called_at(source.partition, source.offset)
        ):
            return  # one that was parked has its place there
        self._take((version.model, version.version), replace(asked, version=version))

    def give_back(self, source: Position) -> None:
        """What was asked there keeps no place that it has only taken."""
        self._places.give_back(source)

    def placed(self, case: Case) -> Case:
        """A case that went through, before it is judged whether too many wait: whether it has a place, or else how many others have."""
        place = case.routed.model, case.routed.version
        if case.placed or not places.limited(case):
            return case
        if not self._places.has(case.source, place):
            self._take(place, case)  # there may be room by now
        if self._places.has(case.source, place):
            return case.having(placed=True)
        return case.having(ahead=self._ahead(place, case))

    def _take(self, place: Version, case: Case) -> None:
        """If there is room. Who is `placed` comes from the queue, and has its place in any case."""
        if places.limited(case) and places.has_room(replace(case, ahead=self._ahead(place, case)), self._world):
            self._places.take(case.source, place)

    def _ahead(self, place: Version, case: Case, *, called: bool = False) -> int:
        """How many have a place before a case that comes now, or is `called`, and aren't in the queue."""
        return self._places.others(case.source, place) + self._waiting(place, case.grant.tenant, called=called)

    def leave(self, case: Case) -> None:
        """A request that went through is decided: from now on its ledger tells whether it waits."""
        version = case.routed
        self._places.give_back(case.source)
        inside = self._inside.get((version.model, version.version))
        if inside is not None:
            inside[case.grant.tenant] -= 1
            if inside[case.grant.tenant] <= 0:
                del inside[case.grant.tenant]

    async def _wait(self, case: Case, accounts: Accounts, size: int, deadline_ms: int) -> cases.Verdict:
        assert self.reading is not None
        if self._closed:
            raise LeftUndone
        began_s = time.monotonic()
        waiting = Held(case, accounts, size)
        self._held.add(waiting)
        self._places.give_back(case.source)  # it is counted there now
        self._look_after()
        try:
            async with self.reading.aside():
                with suppress(TimeoutError):
                    left_s = max(0.0, deadline_ms / 1000 - time.time())
                    await asyncio.wait_for(asyncio.shield(waiting.turn), left_s)
        except BaseException:
            turn = waiting.turn
            if turn.done() and turn.exception() is None and turn.result():
                self.leave(case)
            raise
        finally:
            self._held.remove(waiting)
        waited_ms = int((time.monotonic() - began_s) * 1000)
        if not waiting.turn.done():
            late = Refusal(Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED.text)
            return cases.refuse(case, "turn", late)
        if not waiting.turn.result():
            raise LeftUndone
        now_ms = int(time.time() * 1000)
        after = replace(case, waited_ms=max(waited_ms, now_ms - case.requested_ms), placed=True)
        return after.noting("turn", cases.PASSED, f"{waited_ms} ms until the tenant's turn"), None

    def _too_many(self, case: Case, size: int) -> Refusal | None:
        if self._tier != INTERACTIVE:
            return None
        place = case.routed.model, case.routed.version
        own = self._held.count(place, case.grant.tenant)
        full = len(self._held) >= HELD_MAX or self._held.bytes + size > HELD_BYTES_MAX
        if own < HELD_OF_TENANT_MAX and not full:
            return None
        text = f"{own} requests of this tenant wait for the model `{case.routed.model}` already. Try again later."
        beside = len(self._held.tenants(place)) or 1  # as many of each begin
        return Refusal(Reason.OVERLOADED, text, "model", places.room_in_ms(places.outlook(case, self._world), beside))

    # --- who waits ---------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    def holds(self, tenant: str, request_id: str) -> Waiting | None:
        """A request that waits and goes on waiting, if there is such a one."""
        held = self._held.find(tenant, request_id)
        if held is not None:
            return Waiting(held.case.routed.model, held.case.source, held.case.grant.reply)
        stub = self._parking.lanes.find(tenant, request_id) if self._parking is not None else None
        if stub is None:
            return None
        return Waiting(stub.place[0], Position(self._topic, stub.partition, stub.offset), stub.reply)

    def full(self, partition: int) -> bool:
        """Whether what is held of a partition takes as much memory as it may."""
        return self._held.bytes_of(partition) >= HELD_OF_PARTITION_BYTES_MAX

    def cancel(self, tenant: str, request_id: str) -> bool:
        """A request that waits isn't wanted any more: whether there is such a one. Nothing is decided of it."""
        parked = self._parking is not None and self._parking.cancel(tenant, request_id)
        held = self._held.find(tenant, request_id)
        if held is None:
            return parked
        held.turn.set_exception(Unwanted())
        return True

    # --- whose turn it is --------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """While any wait: lets in whose turn it is. The log tells of turns at its own pace, so it is looked at regularly."""
        parking = self._parking
        while self._held.places() or (parking is not None and parking.busy):
            if (now_s := time.monotonic()) > self._looked_s + FORCE_LOOK_S:
                self._looked_s = now_s
                self._see_who_may_ask()
            for place in self._held.places():
                self._let_in(place)
            if parking is not None:
                parking.look(self._wants)
            await asyncio.sleep(LOOK_S)
            if parking is not None and not (self._held.places() or parking.busy):
                await parking.rest()

    def _wants(self, place: Version, tenant: str, partition: int, called: int) -> int:
        """How many more of a lane are to be read again, to be held."""
        if place == UNREAD:
            return FEW_HELD - called
        at_hand = self._held.count(place, tenant) + called
        if self.full(partition):
            return 1 - at_hand
        if self._held.of_partition(partition) >= HELD_OF_PARTITION_MAX:
            return FEW_HELD - at_hand
        return HELD_OF_LANE_MAX - at_hand if at_hand < LOW_LANE else 0

    def _see_who_may_ask(self) -> None:
        """Who may ask no more needn't wait to hear so."""
        waiting = set(self._held.waiting())
        if self._parking is not None:
            waiting |= self._parking.lanes.tenants()
        before, self._tenants = self._tenants, {tenant: self._world.tenant(tenant) for tenant in waiting}
        for tenant, seen in self._tenants.items():
            if tenant not in before or before[tenant] is not seen:
                keys = good_keys(seen)
                for held in [held for held in self._held.all() if held.case.grant.tenant == tenant]:
                    if held.case.grant.key_id not in keys and not held.turn.done():
                        self._count(held.place, held.case)
                        held.end(True)  # it is judged anew
                if self._parking is not None:
                    self._parking.lanes.hurry(tenant, lambda stub, keys=keys: stub.key_id not in keys)  # type: ignore[misc]

    def _let_in(self, place: Version) -> None:
        """One of each tenant in turn, for as long as any may."""
        went = True
        while went:
            went = False
            for tenant in list(self._held.tenants(place)):
                first = self._held.first(place, tenant)
                if first is not None and self._opens(place, first.case.routed, tenant, first.accounts):
                    self._count(place, first.case)
                    self._places.take(first.case.source, place)
                    self._held.go_on(first)
                    went = True

    def _count(self, place: Version, case: Case) -> None:
        self._inside[place][case.grant.tenant] += 1

    def _opens(self, place: Version, version: ModelVersionRegistered, tenant: str, accounts: Accounts) -> bool:
        inside = self._inside[place]
        queued = accounts.queues.count(pool_name(*place), tenant) + inside[tenant]
        if queued < FREE_MAX and self._tier == INTERACTIVE:
            return True
        if self._tier != INTERACTIVE and self._world.stable(version.model) is None:
            return True  # it needn't wait to hear that there is no such model
        seen = turns.pool(
            version, self._tier, self._world.workers(*place), self._world.ends, int(time.time() * 1000), self._stale_ms
        )
        if self._tier != INTERACTIVE:  # whose requests come in whatever the backlog is
            seen = turns.Pool(seen.window, seen.backlog + inside.total())
        at_most = 1 + len(self._held.tenants(place)) + len(inside) + self._world.queueing_at_most(pool_name(*place))
        if turns.opens(self._tier, seen, queued, at_most):
            return True  # with fewer tenants a part is larger: nobody needs to count them
        tenants = {tenant, *self._held.tenants(place), *inside, *self._world.queueing(pool_name(*place))}
        percent = capacity.reserved_percent(rules.quotas_of(tenant, self._tier, self._world), self._tier, version.model)
        return turns.opens(self._tier, seen, queued, len(tenants), percent)

    # --- partitions come and go --------------------------------------------------------------------------------------

    def revoked(self, partitions: Iterable[int]) -> None:
        """What is held of these is others' to decide."""
        gone = set(partitions)
        if self._parking is not None:
            self._parking.revoked(gone)
        for held in self._held.all():
            if held.case.source.partition in gone:
                held.end(False)

    def assigned(self, partitions: Collection[int]) -> None:
        """These are ours now, and no others."""
        if self._parking is not None:
            self._parking.assigned(partitions)
        self.revoked({held.case.source.partition for held in self._held.all()} - set(partitions))

    def close(self) -> None:
        """Hold nothing any more: what is held stays in the log."""
        self._closed = True
        for held in self._held.all():
            held.end(False)


class Unwanted(Exception):  # no error: its caller took it back
    """The request was cancelled while it was held back."""
