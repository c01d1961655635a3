"""A partition's admission for tests: its requests, `lifecycle`, the rows, and owners that come and go, all in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from typing import Any

from decisions.accounts import Accounts, is_void
from decisions.ledger import GRAIN_MS, STEP_BACK_MS, Cost
from decisions.ledger_rows import Row
from decisions.quota import KINDS, Exceeded, limits_for, reserve
from decisions.recalled import Standing, Verdict
from schemas.events import InferenceAdmitted, InferenceFailed, InferenceRejected, LedgerSaved, Quota
from schemas.topics import HOUR_MS, INTERACTIVE
from tests.decisions.ledgers import Asked, Truth, admitted, ending, in_use, rejected
from tests.decisions.worlds import NOW

RECALLED = 24
"""In place of `recalled.RECALLED_RECORDS`, so that short logs have a part that isn't recalled."""
FLIGHT = 4
"""So many records may others append to the log before one that was sent."""
FLYING_MAX = 6
LATER_MS = STEP_BACK_MS + GRAIN_MS
"""A charge counts at most so much longer than from its own moment on: after a step back, and as long as the last of its slot."""


def saved(accounts: Accounts, committed: int, saved_ms: int, *, last: bool = True) -> list[LedgerSaved]:
    """The rows as they are written."""
    return [event_of(row) for row in accounts.save(committed, saved_ms, last=last)]


def event_of(row: Row) -> LedgerSaved:
    """A row as it is written."""
    return replace(row.without_open(), open=tuple(chain(*row.portions(3))))


@dataclass(eq=False)
class Flying:
    """A verdict on its way to the log, because of the request at `offset`.

    `doomed`: its work can't be sent, so that it is refused after all; it is told so: `takes_back`, and then its stream tells its ending.
    """

    event: Verdict
    offset: int
    since: int
    doomed: bool = False
    takes_back: bool = False


@dataclass(eq=False)
class Former:
    """A former owner that doesn't know it: it follows the log still, and saves."""

    writer: int
    accounts: Accounts
    committed: int


@dataclass
class Site:
    """The owner drives its `Accounts` as the shell does; a crash loses all of it that isn't in the log.

    `done` are the requests whose records are in the log; below the first that isn't they may be committed. `mine` is what this owner let in,
    by the offset of the request. When all was `calm` last, there were `calm_to` requests.
    """

    quotas: tuple[Quota, ...]
    requests: list[Asked] = field(default_factory=list)
    log: list[tuple[int, Any]] = field(default_factory=list)
    rows: list[tuple[int, LedgerSaved]] = field(default_factory=list)
    owner: Accounts = field(default_factory=lambda: Accounts(INTERACTIVE))
    writer: int = 0
    head: int = 0
    committed: int = 0
    calm_to: int = 0
    done: set[int] = field(default_factory=set)
    mine: dict[int, Asked] = field(default_factory=dict)
    flying: list[Flying] = field(default_factory=list)
    late: list[Verdict] = field(default_factory=list)
    formers: list[Former] = field(default_factory=list)
    newest_ms: int = NOW

    # --- requests ------------------------------------------------------------------------------------------------------

    def ask(self, asked: Asked, gap_ms: int = 0) -> None:
        """Append a request; time goes on, or back a little. What isn't committed or heard of yet isn't old."""
        last_ms = self.requests[-1].at_ms if self.requests else NOW
        at_ms = max(last_ms + gap_ms, self.newest_ms - STEP_BACK_MS + 1)
        oldest_ms = min((one.at_ms for one in self.requests[self.calm_to :]), default=at_ms)
        if gap_ms >= HOUR_MS:
            self.end_all(1.0)
        elif max(at_ms, self.newest_ms) - oldest_ms >= STEP_BACK_MS:
            self.calm()
        self.newest_ms = max(self.newest_ms, at_ms)
        self.requests.append(replace(asked, at_ms=at_ms))

    def take_request(self, *, doomed: bool = False) -> Standing | None:
        """Handle the next request: another with its id is handled to its end first."""
        if self.head == len(self.requests):
            return None
        asked, offset = self.requests[self.head], self.head
        while same := [one for one in self.flying if one.event.request_id == asked.request_id]:
            self.deliver(same[0])
        self.head += 1
        found, verdict = self.owner.standing(asked.tenant, asked.request_id, offset)
        if found is Standing.NEW:
            self._decide(asked, offset, doomed=doomed)
        elif found is Standing.REDELIVERED and isinstance(verdict, InferenceRejected):
            self._fly(Flying(verdict, offset, len(self.log)))
        else:
            self.done.add(offset)
        return found

    def _decide(self, asked: Asked, offset: int, *, doomed: bool) -> None:
        limits = limits_for(self.quotas, asked.key, "m")
        found = reserve(self.owner.counters(asked.tenant), limits, Cost(asked.tokens), asked.at_ms)
        if isinstance(found, Exceeded):
            self._check_refusal(asked)
            return self._fly(Flying(rejected(asked, offset), offset, len(self.log)))
        event = admitted(asked, offset, found.hold.scopes)
        self.owner.take(found, event)
        self.mine[offset] = asked
        return self._fly(Flying(event, offset, len(self.log), doomed))

    def _check_refusal(self, asked: Asked) -> None:
        """A limit had no room, each charge dated as late as it may be."""
        known, cost = self.known(asked.tenant), Cost(asked.tokens)
        for limits in self.quotas:
            counted = [one for one in known if not limits.key_id or one.asked.key == asked.key]
            for kind in KINDS:
                limit = getattr(limits, kind.field)
                used = in_use(counted, kind.window, kind.unit, asked.at_ms, LATER_MS)
                if limit is not None and used + cost.amount(kind.unit) > limit:
                    return
        raise AssertionError("there was room")

    # --- the log -------------------------------------------------------------------------------------------------------

    def _fly(self, one: Flying) -> None:
        if len(self.flying) == FLYING_MAX:
            self.deliver(self.flying[0])
        self.flying.append(one)

    def deliver(self, one: Flying) -> None:
        """The broker has it."""
        self.flying.remove(one)
        if one.doomed and isinstance(one.event, InferenceAdmitted):
            refusal = rejected(self.requests[one.offset], one.offset)
            self.flying.append(Flying(refusal, one.offset, len(self.log), takes_back=True))
        else:
            self.done.add(one.offset)
        self.append(one.event)
        if one.takes_back:
            self.append(ending(one.event.request_id, 0, one.event.tenant, source="admission"))

    def append(self, event: Any) -> None:
        """Whoever wrote it."""
        self.log.append((self.newest_ms, event))
        for one in list(self.flying):
            if one in self.flying and one.since <= len(self.log) - FLIGHT:
                self.deliver(one)

    def calm(self) -> None:
        """All is decided, in the log, heard of, and committed."""
        while self.take_request() is not None:
            pass
        while self.flying:
            self.deliver(self.flying[0])
        self.fold(len(self.log))
        self.commit()
        self.calm_to = len(self.requests)

    def fold(self, count: int) -> None:
        follow(self.owner, self.log, count)

    def commit(self) -> None:
        while self.committed in self.done:
            self.committed += 1

    def end_all(self, share: float) -> None:
        """What runs has used such a share of what it holds, and that is heard of."""
        self.calm()
        for asked in self.running():
            self.append(ending(asked.request_id, int(share * asked.tokens), asked.tenant))
        self.fold(len(self.log))

    def running(self) -> list[Asked]:
        """What a worker may have: it is in the log, and hasn't ended there."""
        refused = {one.offset for one in self.flying if one.takes_back}
        told = self.told(len(self.log))
        return [truth.asked for offset, truth in told.items() if truth.used is None and offset not in refused]

    def newest(self, *kinds: type) -> list[Any]:
        """Events about requests of which the first word is among the newest records: nobody repeats older ones."""
        first: dict[Any, int] = {}
        for offset, (_, event) in enumerate(self.log):
            first.setdefault(event.request_id, offset)
            first.setdefault(subject(event), offset)
        oldest = max(0, len(self.log) - RECALLED + 1)
        return [e for _, e in self.log[oldest:] if isinstance(e, kinds) and first[subject(e)] >= oldest]

    # --- what an outsider counts ---------------------------------------------------------------------------------------

    def told(self, count: int) -> dict[int, Truth]:
        """By the offset of its request, what so many records of the log say was let in, and used."""
        found: dict[int, Truth] = {}
        ended: dict[tuple[str, str], InferenceFailed] = {}
        for told_ms, event in self.log[:count]:
            if isinstance(event, InferenceFailed):
                ended.setdefault((event.tenant, event.request_id), event)
            elif isinstance(event, InferenceAdmitted) and not is_void(event, told_ms):
                found[event.source.offset] = Truth(self.requests[event.source.offset])
        for offset, truth in list(found.items()):
            event = ended.get((truth.asked.tenant, truth.asked.request_id))
            if event is not None and event.source == "admission":
                del found[offset]
            elif event is not None:
                assert event.usage is not None
                truth.used = min(event.usage.prompt_tokens + event.usage.completion_tokens, truth.asked.tokens)
        return found

    def pending(self, count: int) -> list[Truth]:
        """What this owner let in and so many records don't tell."""
        admissions = [(at_ms, event) for at_ms, event in self.log[:count] if isinstance(event, InferenceAdmitted)]
        judged = {event.source.offset for at_ms, event in admissions if not is_void(event, at_ms)}
        return [Truth(asked) for offset, asked in self.mine.items() if offset not in judged]

    def known(self, tenant: str, count: int | None = None) -> list[Truth]:
        """What so many records tell of a tenant, and what they don't; None: what this owner knows."""
        count = self.owner.next_offset if count is None else count
        found = [*self.told(count).values(), *self.pending(count)]
        return [truth for truth in found if truth.asked.tenant == tenant]

    # --- rows, and owners that come and go -----------------------------------------------------------------------------

    def save(self, one: Former, random: Random, *, written: bool) -> None:
        """Write the rows, then the mark; if that fails, some are written all the same."""
        rows = one.accounts.save(one.committed, self.newest_ms, last=random.random() < 0.5)
        if not written:
            one.accounts.unsaved(rows)
            others = [row for row in rows if row.tenant and random.random() < 0.5]
            rows = rows if random.random() < 0.2 else others
        self.rows += [(one.writer, event_of(row)) for row in rows]

    @property
    def present(self) -> Former:
        """The owner, seen as one that will go."""
        return Former(self.writer, self.owner, self.committed)

    def hand_over(self, random: Random, *, crashed: bool) -> None:
        """The owner is gone, or doesn't know that it isn't the owner; what it has sent is told, lost, or told too late. Another comes."""
        if not crashed:
            self.formers = [*self.formers, self.present][-3:]
        flying, self.flying = self.flying, []
        ended = {event.request_id for _, event in self.log if isinstance(event, InferenceFailed)}
        unheard = False
        for one in flying:
            fate = random.choice(["told", "lost", "late"])
            if fate == "told":
                self.append(one.event)
            else:
                unheard |= one.event.request_id in ended
                self.late += [one.event] if fate == "late" else []
        self.head, self.mine, self.done, self.writer = self.committed, {}, set(), self.writer + 1
        self.owner = self.recovered(random)
        if unheard:  # before too much is told for anybody to know that it has ended
            self.calm()

    def recovered(self, random: Random) -> Accounts:
        """A newcomer: from the rows, of which Kafka may have dropped those that newer ones of the same writer replace, and the log."""
        rows = [row for _, row in self.rows]
        if random.random() < 0.5:
            rows = list({(writer, row.tenant): row for writer, row in self.rows}.values())
        random.shuffle(rows)
        accounts = Accounts(INTERACTIVE)
        for row in rows:
            accounts.restore(row)
        follow(accounts, self.log, len(self.log), accounts.start)
        return accounts


def subject(event: Any) -> Any:
    """What a record is about: a request's record, or an id that ended."""
    return event.request_id if isinstance(event, InferenceFailed) else event.source


def follow(accounts: Accounts, log: Sequence[tuple[int, Any]], count: int, start: int | None = None) -> None:
    """Apply so many records more."""
    first = accounts.next_offset if start is None else start
    for offset in range(first, min(first + count, len(log))):
        accounts.apply(offset, *log[offset])
