"""Two owners of one partition, of which one may not know that it is none any more: the lease and the folds keep their ledgers to one truth.

What they write and what workers do about it goes through the fold of the streams and back to `lifecycle`, as `endings` does it. So it is
checked that what callers are told is what is charged, whichever of two owners' words comes first in either topic.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decisions.accounts import ANY_TIER, Accounts, is_void
from decisions.ledger import NEW, STEP_BACK_MS, Cost, Counter
from decisions.quota import Exceeded, limits_for, reserve
from decisions.recalled import Standing
from decisions.stream import NEW as UNBEGUN
from decisions.stream import REJECTED, Input, StreamState, fold
from schemas.events import (
    Attempt,
    GenerationStarted,
    InferenceAdmitted,
    InferenceFailed,
    InferenceRejected,
    Quota,
    TokensGenerated,
)
from schemas.topics import BATCH, INTERACTIVE, LIFECYCLE, TOKENS
from streams.fold_table import FoldTable
from streams.lease import Lease
from tests.decisions.ledgers import ONE_LIMIT, Asked, Truth, admitted, check_limits, ending, rejected
from tests.decisions.worlds import NOW

SESSION_MS = 10_000
SKEW_MS = 3_000
"""Between the clocks of a process and of the brokers: less than the part of a session that a lease leaves out."""
PAUSE_MS = st.one_of(st.integers(0, 500), st.integers(0, 4_000), st.integers(5_500, 6_500), st.integers(9_000, 30_000))
"""A moment, a while, about a lease, more than a session."""
ATTEMPT = Attempt(1, 1)


@dataclass(frozen=True)
class Sent:
    """Records of one partition of a topic. `doomed`: the work that follows an admission can't be sent."""

    topic: str
    events: tuple[Any, ...]
    doomed: bool = False


@dataclass(eq=False)
class Member:
    """One admission: its ledger, its lease, which requests it has decided, and what it has sent that the broker hasn't taken."""

    lease: Lease
    accounts: Accounts
    left: bool = False
    decided: set[int] = field(default_factory=set)
    sending: list[Sent] = field(default_factory=list)

    def reject(self, refusal: InferenceRejected, *more: InferenceFailed) -> None:
        """Its caller and `lifecycle` are told."""
        self.sending += [Sent(TOKENS, (refusal, *more)), Sent(LIFECYCLE, (refusal,))]


class TwoOwners(RuleBasedStateMachine):
    """Time passes, members freeze and wake, the group gives the partition on when a session is over; what was sent is taken whenever it is.

    `log` is `lifecycle`. `streams` is what callers see of each request, `endings` what is to be told in `lifecycle` of that, `work` what
    workers have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW
        self.skew_ms = 0
        self.quotas: tuple[Quota, ...] = ()
        self.requests: list[Asked] = []
        self.log: list[tuple[int, Any]] = []
        self.members: list[Member] = []
        self.beat_ms = self.charged_ms = NOW
        self.work: set[str] = set()
        self.streams: dict[str, StreamState] = {}
        self.table = FoldTable(TOKENS, 0, 0, 10**12)
        self.offsets = itertools.count()
        self.endings: deque[Any] = deque()
        self.outsider = Accounts(INTERACTIVE)

    @initialize(quota=ONE_LIMIT, skew_ms=st.integers(-SKEW_MS, SKEW_MS))
    def begin(self, quota: Quota, skew_ms: int) -> None:
        self.quotas, self.skew_ms = (quota,), skew_ms
        self._join()

    def _join(self) -> None:
        """The group gives the partition to a newcomer, which reads all that is told of it before it decides."""
        lease, accounts = Lease(SESSION_MS, lambda: self.now_ms), Accounts(INTERACTIVE)
        lease.proved()
        self.beat_ms = self.now_ms
        self.members.append(Member(lease, accounts))
        self._follow(accounts)

    def _follow(self, accounts: Accounts, count: int | None = None) -> None:
        first = accounts.next_offset
        for offset, (told_ms, event) in enumerate(self.log[first : None if count is None else first + count], first):
            accounts.apply(offset, told_ms, event)

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
        standing, verdict = member.accounts.standing(asked.tenant, asked.request_id, offset)
        if standing is Standing.REDELIVERED:
            if isinstance(verdict, InferenceRejected):
                member.reject(verdict)
            else:
                self.work.add(asked.request_id)
        # What is much older than what was let in is judged as of now by the shell: time never steps back so far.
        if standing is not Standing.NEW or asked.at_ms < self.charged_ms - STEP_BACK_MS:
            return None
        limits = limits_for(self.quotas, asked.key, "m")
        found = reserve(member.accounts.counters(asked.tenant), limits, Cost(asked.tokens), asked.at_ms)
        if isinstance(found, Exceeded):
            return member.reject(rejected(asked, offset))
        event = admitted(asked, offset, found.hold.scopes, valid_until_ms=member.lease.until_ms)
        member.accounts.take(found, event)
        self.charged_ms = max(self.charged_ms, asked.at_ms)
        return member.sending.append(Sent(LIFECYCLE, (event,), doomed=offset % 7 == 6))

    # --- the log ---

    def _append(self, event: Any) -> int:
        told_ms = self.now_ms + self.skew_ms
        self.log.append((told_ms, event))
        return told_ms

    def take(self, member: Member, place: int) -> None:
        """The broker takes what was sent. The writer of an admission sees by the time that it was too late, and takes it back."""
        sent = member.sending.pop(place)
        if sent.topic == TOKENS:
            return self._stream(*sent.events)
        (event,) = sent.events
        told_ms = self._append(event)
        if not isinstance(event, InferenceAdmitted):
            return None
        if is_void(event, told_ms):
            return member.accounts.withdraw(event)
        if sent.doomed:  # it is in the log, so it is taken back by its stream
            word = replace(ending(event.request_id, None), if_not_started=True, source="admission")
            return member.reject(rejected(self._asked(event.request_id), event.source.offset), word)
        return self.work.add(event.request_id)

    @precondition(lambda self: any(member.sending for member in self.members))
    @rule(data=st.data())
    def taken(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from([member for member in self.members if member.sending]))
        self.take(member, data.draw(st.integers(0, len(member.sending) - 1)))

    @rule(data=st.data(), count=st.integers(1, 12))
    def follow(self, data: st.DataObject, count: int) -> None:
        self._follow(data.draw(st.sampled_from(self.members[-2:])).accounts, count)

    # --- streams ---

    def _stream(self, *events: Input) -> None:
        """`tokens` has these; what `endings` makes of them is on its way."""
        for event in events:
            state = self.streams.get(event.request_id, UNBEGUN)
            self.streams[event.request_id], _ = fold(state, event)
            self.endings += self.table.apply(next(self.offsets), self.now_ms, event)

    @rule(count=st.integers(1, 8))
    def endings_are_told(self, count: int) -> None:
        self._tell(min(count, len(self.endings)))

    def _tell(self, count: int) -> None:
        for _ in range(count):
            self._append(self.endings.popleft())

    @precondition(lambda self: self._waiting())
    @rule(data=st.data(), all_of_them=st.booleans())
    def worker_begins(self, data: st.DataObject, all_of_them: bool) -> None:
        """A worker has taken it from `work`, and knows of nothing else."""
        for request_id in self._waiting() if all_of_them else [data.draw(st.sampled_from(self._waiting()))]:
            where = request_id, "acme", "m", "v1", INTERACTIVE
            self._stream(GenerationStarted(*where, ATTEMPT, (0,), 0, "w"))

    def _waiting(self) -> list[str]:
        return sorted(one for one in self.work if self.streams.get(one, UNBEGUN).attempt is None)

    @precondition(lambda self: self._open())
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0]), tier=st.sampled_from([INTERACTIVE, ANY_TIER]))
    def end(self, data: st.DataObject, share: float, tier: str) -> None:
        """A worker's word, the timer's, or that of a cancel, which may not know the tier."""
        self._end(data.draw(st.sampled_from(self._open())), share, tier)

    def _end(self, request_id: str, share: float, tier: str = INTERACTIVE) -> None:
        made = int(share * self._asked(request_id).tokens)
        if self.streams.get(request_id, UNBEGUN).started:
            self._stream(TokensGenerated(request_id, 0, ATTEMPT, 0, (1,) * made, ""))
        self._stream(ending(request_id, None, tier=tier))

    def _open(self) -> list[str]:
        """What a worker has, or is let in."""
        return sorted({*self.work, *(asked.request_id for asked, truth in self._told() if truth.used is None)})

    @rule(data=st.data(), tokens=st.integers(0, 30))
    def on_another_tier(self, data: st.DataObject, tokens: int) -> None:
        """The same ids are asked there, admitted and ended: none of this ledger's business."""
        if self.requests:
            asked = data.draw(st.sampled_from(self.requests))
            self._append(replace(admitted(replace(asked, tokens=tokens)), tier=BATCH))
            self._append(ending(asked.request_id, tokens, asked.tenant, BATCH))

    # --- what holds ---

    def _asked(self, request_id: str) -> Asked:
        return self.requests[int(request_id[1:])]

    def _told(self) -> list[tuple[Asked, Truth]]:
        """What the log alone says was let in, and used. What was refused after all, before it began, has used up nothing."""
        found: dict[str, tuple[Asked, Truth]] = {}
        ended: dict[str, InferenceFailed] = {}
        for told_ms, event in self.log:
            if event.tier not in (INTERACTIVE, ANY_TIER):
                continue
            if isinstance(event, InferenceFailed):
                ended.setdefault(event.request_id, event)
            elif isinstance(event, InferenceAdmitted) and told_ms <= event.valid_until_ms:
                asked = self.requests[event.source.offset]
                found[event.request_id] = asked, Truth(asked)
        for request_id, event in ended.items():
            if event.source == "admission":
                found.pop(request_id, None)
            elif request_id in found:
                assert event.usage is not None
                found[request_id][1].used = event.usage.prompt_tokens + event.usage.completion_tokens
        return list(found.values())

    @invariant()
    def no_limit_is_passed(self) -> None:
        truths = [truth for _, truth in self._told()]
        check_limits(truths, self.quotas, self.now_ms + self.skew_ms)

    @invariant()
    def what_runs_is_held(self) -> None:
        """Whoever reads the log to its end counts what an outsider counts, and each stream that goes on is among it."""
        self._follow(self.outsider)
        counter, told = self._counter(self.outsider), self._told()
        standing = {asked.request_id: truth for asked, truth in told if truth.used is None}
        assert counter.running == len(standing)
        assert counter.held == sum(truth.charged for truth in standing.values())
        runs = {one for one, state in self.streams.items() if state.started and state.closed is None}
        assert runs <= set(standing)

    def _counter(self, accounts: Accounts) -> Counter:
        return accounts.counters("acme").get("", NEW)

    def teardown(self) -> None:
        """Everybody who reads the log to its end knows the same, and that is what callers were told; at rest nothing is held."""
        for member in self.members:
            while member.sending:
                self.take(member, 0)
        for request_id in self._open():
            self._end(request_id, 0.5)
        self._tell(len(self.endings))
        served = {one: state for one, state in self.streams.items() if one in self._let_in()}
        used = sum(sum(state.accepted) for state in served.values())
        for accounts in (self.outsider, *(member.accounts for member in self.members)):
            self._follow(accounts)
            counter = self._counter(accounts)
            assert (counter.running, counter.held) == (0, 0)
            assert (counter.requests_total, counter.tokens_total) == (len(served), used)

    def _let_in(self) -> set[str]:
        """Whose callers weren't refused."""
        let_in = {
            e.request_id
            for ms, e in self.log
            if isinstance(e, InferenceAdmitted) and e.tier == INTERACTIVE and ms <= e.valid_until_ms
        }
        return {one for one in let_in if (closed := self.streams[one].closed) is None or closed.outcome != REJECTED}


TestTwoOwners = TwoOwners.TestCase
TestTwoOwners.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
