"""The turnstile acts: holds back, before anything is decided of them, the requests whose tenant has enough in the pool's queue.

Who is held back has no place among the records that are handled at once, and its record isn't acked: after a crash it comes again. It goes
on when its turn comes (`decisions.turnstile`), or is told at its deadline, or refused at once if its turn can't come before. Of tiers
other than interactive a partition with many that wait isn't read on, so the rest stays in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from decisions import admission as rules
from decisions import capacity, cases
from decisions import turnstile as turns
from decisions.accounts import Accounts
from decisions.cases import Case, Refusal
from decisions.queues import pool_name
from infra import metrics
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import INTERACTIVE
from streams.faust_shell import LeftUndone
from streams.world import LiveWorld

LOOK_S = 0.02
FREE_MAX = 8
"""So few of one interactive tenant never wait: most requests cost no more than this comparison."""
HELD_MAX, HELD_OF_TENANT_MAX = 8_192, 2_048
"""Interactive requests held back: of all tenants, and of one. More are refused."""
HELD_BYTES_MAX = 256 * 1024 * 1024
READ_ON_BELOW, READ_NO_MORE_FROM = 256, 512
"""Of other tiers, and of one partition."""
READ_NO_MORE_BYTES = 32 * 1024 * 1024

MANY_HELD = "many are held back"

Version = tuple[str, str]


class Reading(Protocol):
    """What the turnstile needs of whoever hands on records."""

    def aside(self) -> AbstractAsyncContextManager[None]:
        """While in it, the record that this task handles is none of those handled at once."""

    def pause(self, partition: int, why: str) -> None:
        """Read no more of a partition for now."""

    def resume(self, partition: int, why: str) -> None:
        """Read on, as far as this reason goes."""


@dataclass(eq=False)
class _Held:
    """A request that waits for its turn."""

    case: Case
    accounts: Accounts
    size: int
    turn: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, goes_on: bool) -> None:
        if not self.turn.done():
            self.turn.set_result(goes_on)


class Turnstile:
    """One tier's. `enter` before a request is decided, `leave` once it counts in its ledger or is refused."""

    def __init__(self, world: LiveWorld, tier: str, stale_ms: int) -> None:
        self._world = world
        self._tier = tier
        self._stale_ms = stale_ms
        self.reading: Reading | None = None
        self._held: dict[Version, OrderedDict[str, deque[_Held]]] = {}
        self._inside: defaultdict[Version, Counter[str]] = defaultdict(Counter)
        self._by_id: dict[tuple[str, str], _Held] = {}
        self._of_partition: Counter[int] = Counter()
        self._bytes_of_partition: Counter[int] = Counter()
        self._paused: set[int] = set()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    # --- a request ---------------------------------------------------------------------------------------------------

    async def enter(self, case: Case, accounts: Accounts, size: int) -> cases.Verdict:
        """Returns when it is a routed request's turn, or with why it has none. Raises LeftUndone if its partition goes first.

        `size` is the bytes of its record. Unless it is refused, call `leave` when it counts in `accounts`, or doesn't come to that.
        """
        version = case.routed
        place, tenant = (version.model, version.version), case.grant.tenant
        held = self._held.get(place)
        if (held is None or tenant not in held) and self._opens(place, version, tenant, accounts):
            self._count(place, tenant)
            return case, None
        if (refusal := self._too_many(case, size)) is not None:
            return cases.refuse(case, "turn", refusal)
        dated = rules.check_deadline(case, self._world)
        assert isinstance(dated, Case)
        ahead = len(held[tenant]) if held is not None and tenant in held else 0
        if isinstance(late := rules.check_wait(replace(dated, ahead=ahead), self._world), Refusal):
            return cases.refuse(case, "turn", late)
        return await self._wait(case, accounts, size, dated.deadline_ms)

    def leave(self, case: Case) -> None:
        """A request that went through is decided: from now on its ledger tells whether it waits."""
        version = case.routed
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
        waiting = self._hold(_Held(case, accounts, size))
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
            self._let_go(waiting)
        waited_ms = int((time.monotonic() - began_s) * 1000)
        if not waiting.turn.done():
            late = Refusal(Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED.text)
            return cases.refuse(case, "turn", late)
        if not waiting.turn.result():
            raise LeftUndone
        after = replace(case, waited_ms=max(waited_ms, int(time.time() * 1000) - case.requested_ms))
        return after.noting("turn", cases.PASSED, f"{waited_ms} ms until the tenant's turn"), None

    def _too_many(self, case: Case, size: int) -> Refusal | None:
        if self._tier != INTERACTIVE:
            return None
        lanes = self._held.get((case.routed.model, case.routed.version))
        own = len(lanes.get(case.grant.tenant, ())) if lanes is not None else 0
        full = len(self._by_id) >= HELD_MAX or sum(self._bytes_of_partition.values()) + size > HELD_BYTES_MAX
        if own < HELD_OF_TENANT_MAX and not full:
            return None
        text = f"{own} requests of this tenant wait for the model `{case.routed.model}` already. Try again later."
        return Refusal(Reason.OVERLOADED, text, "model", rules.RETRY_AFTER_MIN_MS)

    # --- who is held -------------------------------------------------------------------------------------------------

    def _hold(self, held: _Held) -> _Held:
        case = held.case
        place, partition = (case.routed.model, case.routed.version), case.source.partition
        self._held.setdefault(place, OrderedDict()).setdefault(case.grant.tenant, deque()).append(held)
        self._by_id[case.grant.tenant, case.request.request_id] = held
        self._of_partition[partition] += 1
        self._bytes_of_partition[partition] += held.size
        metrics.HELD_BACK.labels(self._tier).set(len(self._by_id))
        many = self._of_partition[partition] >= READ_NO_MORE_FROM
        many = many or self._bytes_of_partition[partition] >= READ_NO_MORE_BYTES
        if many and self._tier != INTERACTIVE and partition not in self._paused:
            assert self.reading is not None
            self._paused.add(partition)
            self.reading.pause(partition, MANY_HELD)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return held

    def _let_go(self, held: _Held) -> None:
        case = held.case
        place, tenant, partition = (case.routed.model, case.routed.version), case.grant.tenant, case.source.partition
        lanes = self._held.get(place, OrderedDict())
        if held in (lane := lanes.get(tenant, deque())):
            lane.remove(held)
        if not lane:
            lanes.pop(tenant, None)
        if not lanes:
            self._held.pop(place, None)
        self._by_id.pop((tenant, case.request.request_id), None)
        self._of_partition[partition] -= 1
        self._bytes_of_partition[partition] -= held.size
        metrics.HELD_BACK.labels(self._tier).set(len(self._by_id))
        few = (
            self._of_partition[partition] < READ_ON_BELOW
            and self._bytes_of_partition[partition] < READ_NO_MORE_BYTES // 2
        )
        if partition in self._paused and few:
            assert self.reading is not None
            self._paused.discard(partition)
            self.reading.resume(partition, MANY_HELD)

    def holds(self, tenant: str, request_id: str) -> Case | None:
        """A request that is held back and goes on waiting, if there is such a one."""
        held = self._by_id.get((tenant, request_id))
        return held.case if held is not None and not held.turn.done() else None

    def full(self, partition: int) -> bool:
        """Whether what is held of a partition takes as much memory as it may."""
        return self._bytes_of_partition[partition] >= READ_NO_MORE_BYTES

    def cancel(self, tenant: str, request_id: str) -> bool:
        """A request that is held back isn't wanted any more: whether there is such a one. Nothing is decided of it."""
        held = self._by_id.get((tenant, request_id))
        if held is None or held.turn.done():
            return False
        held.turn.set_exception(Unwanted())
        return True

    # --- whose turn it is --------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """While any is held: lets in whose turn it is. The log tells of turns at its own pace, so it is looked at regularly."""
        while self._held:
            for place in list(self._held):
                self._let_in(place)
            await asyncio.sleep(LOOK_S)

    def _let_in(self, place: Version) -> None:
        """One of each tenant in turn, for as long as any may."""
        lanes = self._held[place]
        went = True
        while went:
            went = False
            for tenant in list(lanes):
                lane = lanes[tenant]
                while lane and lane[0].turn.done():
                    lane.popleft()
                first = lane[0] if lane else None
                if first is None:
                    del lanes[tenant]
                elif self._opens(place, first.case.routed, tenant, first.accounts):
                    lane.popleft()
                    lanes.move_to_end(tenant)
                    self._count(place, tenant)
                    first.end(True)
                    went = True
        if not lanes:
            self._held.pop(place, None)

    def _count(self, place: Version, tenant: str) -> None:
        self._inside[place][tenant] += 1

    def _opens(self, place: Version, version: ModelVersionRegistered, tenant: str, accounts: Accounts) -> bool:
        inside = self._inside[place]
        queued = accounts.queues.count(pool_name(*place), tenant) + inside[tenant]
        if queued < FREE_MAX and self._tier == INTERACTIVE:
            return True
        seen = turns.pool(
            version, self._tier, self._world.workers(*place), self._world.ends, int(time.time() * 1000), self._stale_ms
        )
        if self._tier != INTERACTIVE:  # whose requests come in whatever the backlog is
            seen = turns.Pool(seen.window, seen.backlog + inside.total())
        at_most = 1 + len(self._held.get(place, ())) + len(inside) + self._world.queueing_at_most(pool_name(*place))
        if turns.opens(self._tier, seen, queued, at_most):
            return True  # with fewer tenants a part is larger: nobody needs to count them
        tenants = {tenant, *self._held.get(place, ()), *inside, *self._world.queueing(pool_name(*place))}
        percent = capacity.reserved_percent(rules.quotas_of(tenant, self._tier, self._world), self._tier, version.model)
        return turns.opens(self._tier, seen, queued, len(tenants), percent)

    # --- partitions come and go --------------------------------------------------------------------------------------

    def revoked(self, partitions: Iterable[int]) -> None:
        """What is held of these is others' to decide."""
        gone = set(partitions)
        for held in list(self._by_id.values()):
            if held.case.source.partition in gone:
                held.end(False)

    def assigned(self, partitions: Collection[int]) -> None:
        """Whatever was paused is read again: whoever assigns begins anew."""
        self._paused.clear()
        self.revoked({held.case.source.partition for held in self._by_id.values()} - set(partitions))

    def close(self) -> None:
        """Hold nothing any more: what is held stays in the log."""
        self._closed = True
        for held in list(self._by_id.values()):
            held.end(False)


class Unwanted(Exception):  # no error: its caller took it back
    """The request was cancelled while it was held back."""
