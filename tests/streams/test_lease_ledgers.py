"""Two owners of one partition, of which one may not know that it is none any more: the lease keeps their ledgers to one truth."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decisions.accounts import ANY_TIER, Accounts, Standing, is_void
from decisions.ledger import NEW, Cost
from decisions.quota import Exceeded, limits_for, reserve
from schemas.events import InferenceAdmitted, InferenceFailed, InferenceRejected, Quota
from schemas.topics import BATCH, INTERACTIVE
from streams.lease import Lease
from tests.decisions.ledgers import ONE_LIMIT, Asked, Truth, admitted, check_limits, ending, rejected
from tests.decisions.worlds import NOW

SESSION_MS = 10_000
SKEW_MS = 3_000
"""Between the clocks of a process and of the brokers: less than the part of a session that a lease leaves out."""
PAUSE_MS = st.one_of(st.integers(0, 500), st.integers(0, 4_000), st.integers(5_500, 6_500), st.integers(9_000, 30_000))
"""A moment, a while, about a lease, more than a session."""


@dataclass(eq=False)
class Member:
    """One admission: its ledger, its lease, which requests it has decided, and what it has sent that the broker hasn't taken."""

    lease: Lease
    accounts: Accounts
    owner: bool = True
    left: bool = False
    decided: set[int] = field(default_factory=set)
    sending: list[InferenceAdmitted] = field(default_factory=list)


class TwoOwners(RuleBasedStateMachine):
    """Time passes, members freeze and wake, the group gives the partition on when a session is over; what was sent is taken whenever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW
        self.skew_ms = 0
        self.quotas: tuple[Quota, ...] = ()
        self.requests: list[Asked] = []
        self.log: list[tuple[int, Any]] = []
        self.members: list[Member] = []
        self.beat_ms = NOW

    @initialize(quota=ONE_LIMIT, skew_ms=st.integers(-SKEW_MS, SKEW_MS))
    def begin(self, quota: Quota, skew_ms: int) -> None:
        self.quotas, self.skew_ms = (quota,), skew_ms
        self._join()

    def _join(self) -> None:
        """The group gives the partition to a newcomer, which reads all that is told of it before it decides."""
        lease, accounts = Lease(SESSION_MS, lambda: self.now_ms), Accounts(INTERACTIVE)
        lease.proved()
        self.beat_ms = self.now_ms
        for member in self.members:
            member.owner = False
        self.members.append(Member(lease, accounts))
        self._follow(self.members[-1])

    def _follow(self, member: Member, count: int | None = None) -> None:
        first = member.accounts.next_offset
        for offset, (told_ms, event) in enumerate(self.log[first : None if count is None else first + count], first):
            member.accounts.apply(offset, told_ms, event)

    @property
    def owner(self) -> Member:
        return self.members[-1]

    # --- time and the group ---

    @rule(pause_ms=PAUSE_MS)
    def time_passes(self, pause_ms: int) -> None:
        self.now_ms += pause_ms

    @rule(pause_ms=PAUSE_MS)
    def beat(self, pause_ms: int) -> None:
        """A heartbeat of whoever has the partition, whose answer may come late; the group counts from when it was sent."""
        sent_ms = self.now_ms
        if sent_ms < self.beat_ms + SESSION_MS:
            self.beat_ms = sent_ms
            self.now_ms += pause_ms
            self.owner.lease.proved(sent_ms)

    @precondition(lambda self: self.now_ms >= self.beat_ms + SESSION_MS)
    @rule()
    def expire(self) -> None:
        """The group has heard nothing of the owner for a session: another comes. The former one doesn't know."""
        self._join()

    @rule()
    def leave(self) -> None:
        """The owner gives the partition up: once what it sent is taken, or can't come to count any more."""
        if self.owner.sending and self.owner.lease.left_s > 0:
            while self.owner.sending:
                self.take(self.owner, 0)
        self.owner.left = True
        self._join()

    @rule(
        data=st.data(), tokens=st.integers(10, 30), beaten_ms=PAUSE_MS, woken_ms=st.integers(0, 500), left=st.booleans()
    )
    def frozen_between_deciding_and_sending(
        self, data: st.DataObject, tokens: int, beaten_ms: int, woken_ms: int, left: bool
    ) -> None:
        """The owner decides and doesn't send; its successor decides by what it reads; then the former one wakes."""
        former = self.owner
        self.ask(tokens, 3)
        self._decide_some(data, former, 3)
        self.now_ms += beaten_ms
        if left:
            self.leave()
        elif self.now_ms >= self.beat_ms + SESSION_MS:
            self._join()
        else:
            return
        successor = self.owner
        self._decide_some(data, successor, 3)
        self.now_ms += woken_ms
        while successor.sending:
            self.take(successor, 0)
        while former.sending:
            self.take(former, 0)

    # --- requests ---

    @rule(tokens=st.integers(0, 30), together=st.integers(1, 3))
    def ask(self, tokens: int, together: int) -> None:
        for _ in range(together):
            self.requests.append(Asked(self.now_ms + self.skew_ms, f"r{len(self.requests)}", tokens, "k1"))

    @rule(data=st.data(), count=st.integers(1, 4))
    def decide(self, data: st.DataObject, count: int) -> None:
        """Any member that holds its lease, whether the partition is its own or not: it can't know."""
        self._decide_some(data, data.draw(st.sampled_from(self.members[-2:])), count)

    def _decide_some(self, data: st.DataObject, member: Member, count: int) -> None:
        """In any order: a long prompt is tokenised while shorter ones pass it."""
        for _ in range(count):
            undecided = [offset for offset in range(len(self.requests)) if offset not in member.decided]
            if not undecided or member.left or not member.lease.holds:
                return
            offset = data.draw(st.sampled_from(undecided[:6]))
            member.decided.add(offset)
            self._decide(member, offset)

    def _decide(self, member: Member, offset: int) -> None:
        asked = self.requests[offset]
        standing, _ = member.accounts.standing(asked.tenant, asked.request_id, offset)
        if standing is not Standing.NEW:
            return
        limits = limits_for(self.quotas, asked.key, "m")
        found = reserve(member.accounts.counters(asked.tenant), limits, Cost(asked.tokens), asked.at_ms)
        if isinstance(found, Exceeded):
            # One that comes late would take back what was let in (ADR 14), which is another property's.
            if member.owner:
                self._append(rejected(asked, offset))
            return
        event = admitted(asked, offset, found.hold.scopes, valid_until_ms=member.lease.until_ms)
        member.accounts.take(found, event)
        member.sending.append(event)

    # --- the log ---

    def _append(self, event: Any) -> int:
        told_ms = self.now_ms + self.skew_ms
        self.log.append((told_ms, event))
        return told_ms

    def take(self, member: Member, place: int) -> None:
        """The broker takes what was sent. Its writer sees by the time that it was too late, and takes it back."""
        event = member.sending.pop(place)
        told_ms = self._append(event)
        if is_void(event, told_ms):
            member.accounts.withdraw(event)

    @precondition(lambda self: any(member.sending for member in self.members))
    @rule(data=st.data())
    def taken(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from([member for member in self.members if member.sending]))
        self.take(member, data.draw(st.integers(0, len(member.sending) - 1)))

    @rule(data=st.data(), count=st.integers(1, 12))
    def follow(self, data: st.DataObject, count: int) -> None:
        self._follow(data.draw(st.sampled_from(self.members[-2:])), count)

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0]), tier=st.sampled_from([INTERACTIVE, ANY_TIER]))
    def end(self, data: st.DataObject, share: float, tier: str) -> None:
        """A worker's word, the timer's, or that of a cancel, which may not know the tier."""
        if standing := [asked for asked, truth in self._told() if truth.used is None]:
            asked = data.draw(st.sampled_from(standing))
            self._append(ending(asked.request_id, int(share * asked.tokens), asked.tenant, tier))

    @rule(data=st.data(), tokens=st.integers(0, 30))
    def on_another_tier(self, data: st.DataObject, tokens: int) -> None:
        """The same ids are asked there, admitted and ended: none of this ledger's business."""
        if self.requests:
            asked = data.draw(st.sampled_from(self.requests))
            self._append(replace(admitted(replace(asked, tokens=tokens)), tier=BATCH))
            self._append(ending(asked.request_id, tokens, asked.tenant, BATCH))

    # --- what holds ---

    def _told(self) -> list[tuple[Asked, Truth]]:
        """What the log alone says was let in, and used."""
        found: dict[str, tuple[Asked, Truth]] = {}
        judged: set[str] = set()
        for told_ms, event in self.log:
            if event.tier not in (INTERACTIVE, ANY_TIER):
                continue
            if isinstance(event, InferenceFailed):
                assert event.usage is not None
                used = event.usage.prompt_tokens + event.usage.completion_tokens
                if (known := found.get(event.request_id)) is not None and known[1].used is None:
                    known[1].used = used
            elif isinstance(event, InferenceRejected):
                judged.add(event.request_id)
            elif told_ms <= event.valid_until_ms and event.request_id not in judged:
                judged.add(event.request_id)
                asked = self.requests[event.source.offset]
                found[event.request_id] = asked, Truth(asked)
        return list(found.values())

    @invariant()
    def no_limit_is_passed(self) -> None:
        truths = [truth for _, truth in self._told()]
        check_limits(truths, self.quotas, self.now_ms + self.skew_ms)

    def teardown(self) -> None:
        """Everybody who reads the log to its end knows the same, and that is what an outsider counts; at rest nothing is held."""
        for member in self.members:
            while member.sending:
                self.take(member, 0)
        for asked, truth in self._told():
            if truth.used is None:
                self._append(ending(asked.request_id, asked.tokens // 2, asked.tenant))
        used = sum(truth.used or 0 for _, truth in self._told())
        for member in self.members:
            self._follow(member)
            counter = member.accounts.counters("acme").get("", NEW)
            assert (counter.running, counter.held, counter.tokens_total) == (0, 0, used)


TestTwoOwners = TwoOwners.TestCase
TestTwoOwners.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
