"""The tenants' ledgers of one partition: a fold of `lifecycle`, and on top of it what was decided here and isn't told there yet.

`lifecycle` has the admissions, with what each reserves, and the endings, with what each used, in one order for everybody. So what a tenant has
reserved and spent is a function of the log alone: whoever reads the same records knows the same, and nothing has to be written beside them. A
decision counts at once (`take`), before its record is in the log, so that the next one sees it. Rows (`save`) only spare a newcomer the reading
of months: each holds a tenant as of an offset, and of several rows that of the highest offset holds, whoever wrote it.

`Accounts` is the bookkeeping: records in, rows out. It reads no clock and does no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from decisions import ledger
from decisions.ledger import Charges, Cost, Counter, Counters, Hold
from decisions.quota import Reserved
from schemas.events import (
    InferenceAdmitted,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    LedgerSaved,
    Position,
    Reply,
    SavedCounter,
    SavedHold,
)
from schemas.topics import HOUR_MS, requests_topic

LAPSE_MS = 2 * HOUR_MS
"""So long after it must have ended a request's stream is no longer in `tokens` (its retention), so nobody can tell its ending any more."""
RECALLED_RECORDS = 10_000
"""Of so many records of the partition it is remembered what they told: a former owner may tell it again, and an ending may be told before its
admission. A newcomer reads them all, so there are not more."""
OPEN_SAVED_MAX = 20_000
"""Open requests of one tenant that its row has room for: a megabyte."""
TOLD_MAX = 200_000
"""Decisions of one partition that are kept because their records may come again; of more, the oldest is forgotten."""

Key = tuple[str, str]
"""Tenant and request id."""
Verdict = InferenceAdmitted | InferenceRejected


class Standing(StrEnum):
    """What a record that asks is to what was decided before."""

    NEW = "new"
    """Nothing is known of it: decide."""
    REDELIVERED = "redelivered"
    """This very record was decided before a crash: do the same again."""
    REPEATED = "repeated"
    """Another record with this id was decided: that one's stream is its answer."""
    ENDED = "ended"
    """Its stream was ended before it was decided (a cancel was faster): nobody hears any more, and nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a request reserves that was let in here."""

    hold: Hold
    admitted: InferenceAdmitted


@dataclass(frozen=True, slots=True)
class _Open:
    """`last_ms`: when it must have ended, its time limit after its deadline. `reply`: where its stream is."""

    hold: Hold
    last_ms: int
    reply: Reply | None


@dataclass(frozen=True, slots=True)
class _Told:
    """A verdict, the offset of its record, the record that it was about, and whether its ending is told, too."""

    verdict: Verdict
    offset: int
    source: Position
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Stray:
    """An ending whose admission isn't told: the offset of its record, and what was used."""

    offset: int
    tokens: int


@dataclass(slots=True)
class _Tenant:
    """`through`: the records below that offset are in the row it came from, 0 if it had none; `saved`: those in its newest row.

    `open` is told by the log; `pending` was decided here and isn't yet.
    """

    through: int = 0
    saved: int = 0
    counters: dict[str, Counter] = field(default_factory=dict)
    open: dict[str, _Open] = field(default_factory=dict)
    pending: dict[str, Taken] = field(default_factory=dict)


class Accounts:
    """See the module. First `restore` every row there is, then `apply` the records of `lifecycle` from `start` on."""

    def __init__(self, tier: str) -> None:
        """The ledgers of one tier: what the partition tells of others is passed over."""
        self._tier = tier
        self._source = requests_topic(tier)
        self._tenants: dict[str, _Tenant] = {}
        self._mark = LedgerSaved("", tier, 0, 0)
        self._next = 0
        self._now_ms = 0
        self._told: OrderedDict[Key, _Told] = OrderedDict()
        self._strays: OrderedDict[Key, _Stray] = OrderedDict()
        self._partition: int | None = None
        self._unsaved: set[str] = set()

    # --- coming back ---------------------------------------------------------------------------------------------------

    def restore(self, row: LedgerSaved) -> None:
        """One row, in any order."""
        if row.tier != self._tier:
            return
        if not row.tenant:
            self._mark = max(self._mark, row, key=lambda mark: (mark.through, mark.start))
        elif row.tenant not in self._tenants or row.through > self._tenants[row.tenant].through:
            self._tenants[row.tenant] = _Tenant(
                row.through,
                row.through,
                {saved.scope: _counter(saved) for saved in row.counters},
                {saved.request_id: _open(saved) for saved in row.open},
            )

    @property
    def start(self) -> int:
        """The offset to read `lifecycle` from, once every row is restored."""
        return self._mark.start

    # --- the fold ------------------------------------------------------------------------------------------------------

    @property
    def next_offset(self) -> int:
        """Every record below is applied."""
        return self._next

    def apply(self, offset: int, timestamp_ms: int, event: object) -> None:
        """One record of the partition, in order. What says nothing of a reservation of this tier is passed over."""
        self._next = max(self._next, offset + 1)
        self._now_ms = max(self._now_ms, timestamp_ms)
        while self._strays and next(iter(self._strays.values())).offset < self._next - RECALLED_RECORDS:
            self._strays.popitem(last=False)
        match event:
            case InferenceAdmitted() if event.tier == self._tier and not is_void(event, timestamp_ms):
                self._admitted(offset, event)
            case InferenceRejected() if event.tier == self._tier:
                self._rejected(offset, event)
            case InferenceCompleted() | InferenceFailed() if event.tier == self._tier:
                self._ended(offset, event)
            case _:
                return

    def _tenant(self, name: str) -> _Tenant:
        return self._tenants.setdefault(name, _Tenant())

    def _admitted(self, offset: int, event: InferenceAdmitted) -> None:
        """Counts once for each record that asked, and not while the same id is open: both have one stream, and one ending."""
        key = event.tenant, event.request_id
        tenant = self._tenant(event.tenant)
        self._partition = event.source.partition
        if counts := self._is_news(key, event.source):
            self._note(key, _Told(event, offset, event.source))
        if offset < tenant.through:
            return
        self._unsaved.add(event.tenant)
        taken = _pop_pending(tenant, event)
        if not counts or event.request_id in tenant.open:
            if taken is not None:
                tenant.counters.update(ledger.withdraw(tenant.counters, taken.hold))
            return
        if taken is not None:
            hold = taken.hold
        else:  # decided by somebody else: before this partition came here, or by a former owner that doesn't know it yet
            hold, changed = ledger.hold(tenant.counters, event.scopes, cost(event), event.requested_ms)
            tenant.counters.update(changed)
        if (stray := self._strays.pop(key, None)) is not None:
            tenant.counters.update(ledger.settle(tenant.counters, hold, stray.tokens))
        else:
            tenant.open[event.request_id] = _Open(hold, _last_ms(event), event.reply)

    def _rejected(self, offset: int, event: InferenceRejected) -> None:
        """What its record holds is given back. What another record with its id holds isn't: whoever asks may make up an id."""
        source = event.source
        if source is None or source.topic != self._source or self._partition not in (None, source.partition):
            return  # what can't be read is refused in whatever partition it is
        key = event.tenant, event.request_id
        tenant = self._tenant(event.tenant)
        told = self._told.get(key)
        if (taken := _pop_pending(tenant, event)) is not None:
            tenant.counters.update(ledger.withdraw(tenant.counters, taken.hold))
        if told is not None and isinstance(told.verdict, InferenceAdmitted):
            if told.source != source or told.ended:
                return
            self._told[key] = _Told(event, told.offset, source)
            if offset >= tenant.through and (opened := tenant.open.pop(event.request_id, None)) is not None:
                self._unsaved.add(event.tenant)
                tenant.counters.update(ledger.withdraw(tenant.counters, opened.hold))
        elif self._is_news(key, source):
            self._note(key, _Told(event, offset, source))

    def _ended(self, offset: int, event: InferenceCompleted | InferenceFailed) -> None:
        """Of this tier alone: the same id may be asked on another, and what ends there was charged there."""
        tenant, key = self._tenants.get(event.tenant), (event.tenant, event.request_id)
        opened = tenant.open.pop(event.request_id, None) if tenant is not None and offset >= tenant.through else None
        if tenant is not None and opened is not None:
            self._unsaved.add(event.tenant)
            tenant.counters.update(ledger.settle(tenant.counters, opened.hold, used_tokens(event)))
        told = self._told.get(key)
        if told is not None and isinstance(told.verdict, InferenceAdmitted):
            self._told[key] = replace(told, ended=True)
        elif opened is None:
            self._strays.setdefault(key, _Stray(offset, used_tokens(event)))

    def _is_news(self, key: Key, source: Position) -> bool:
        """Whether no verdict is told of this record, nor of a later one with its id."""
        told = self._told.get(key)
        if told is None or (told.source.topic, told.source.partition) != (source.topic, source.partition):
            return True
        return source.offset > told.source.offset

    def _note(self, key: Key, told: _Told) -> None:
        """A verdict whose record may be delivered again."""
        self._told.pop(key, None)
        self._told[key] = told
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)

    # --- deciding ------------------------------------------------------------------------------------------------------

    def standing(self, tenant: str, request_id: str, source_offset: int) -> tuple[Standing, Verdict | None]:
        """What to do with a request at this offset of its partition, and what was decided of its id."""
        told, known = self._told.get((tenant, request_id)), self._tenants.get(tenant)
        if known is not None and (taken := known.pending.get(request_id)) is not None:
            same = taken.admitted.source.offset == source_offset
            return Standing.REDELIVERED if same else Standing.REPEATED, taken.admitted
        if told is not None:
            same = told.source.offset == source_offset
            # Of two refused with one id, the earlier was decided before.
            earlier = isinstance(told.verdict, InferenceRejected) and source_offset < told.source.offset
            return Standing.REDELIVERED if same or earlier else Standing.REPEATED, told.verdict
        if known is not None and request_id in known.open:
            return Standing.REPEATED, None
        return (Standing.ENDED if (tenant, request_id) in self._strays else Standing.NEW), None

    def reply_of(self, tenant: str, request_id: str) -> Reply | None:
        """Where an admitted request's stream is, as far as is known."""
        known, told = self._tenants.get(tenant), self._told.get((tenant, request_id))
        if known is not None and (taken := known.pending.get(request_id)) is not None:
            return taken.admitted.reply
        if known is not None and (opened := known.open.get(request_id)) is not None:
            return opened.reply
        return told.verdict.reply if told is not None and isinstance(told.verdict, InferenceAdmitted) else None

    def counters(self, tenant: str) -> Counters:
        """What a tenant has reserved and spent, with what was decided here and isn't told yet."""
        known = self._tenants.get(tenant)
        return known.counters if known is not None else {}

    def tenants(self) -> Mapping[str, Counters]:
        """The same for every tenant of which anything is known."""
        return {name: tenant.counters for name, tenant in self._tenants.items()}

    def take(self, reserved: Reserved, admitted: InferenceAdmitted) -> None:
        """A request is let in: what `quota.reserve` found counts from now on. Nothing may be decided between the two."""
        tenant = self._tenant(admitted.tenant)
        tenant.counters.update(reserved.changed)
        tenant.pending[admitted.request_id] = Taken(reserved.hold, admitted)

    def withdraw(self, admitted: InferenceAdmitted) -> None:
        """A request that was let in is refused after all, or was never told: it has used up nothing. Once it is told, its record counts."""
        tenant = self._tenant(admitted.tenant)
        if (taken := tenant.pending.pop(admitted.request_id, None)) is not None:
            tenant.counters.update(ledger.withdraw(tenant.counters, taken.hold))

    # --- rows ----------------------------------------------------------------------------------------------------------

    def save(self, committed: int, saved_ms: int) -> list[LedgerSaved]:
        """The rows of the tenants that changed, and last the mark of the partition. They are to be written in this order.

        A tenant with more open requests than a record takes has its row later; until then a newcomer reads on from its last one.

        `committed` is the offset of the requests to be read next after a crash: what was decided of those below is needed no more.
        """
        if not self._next:
            return []
        self._told = OrderedDict(
            (key, told) for key, told in self._told.items() if self._may_come_again(told, committed)
        )
        self._lapse()
        large = {name for name in self._unsaved if len(self._tenants[name].open) > OPEN_SAVED_MAX}
        rows = [self._row(name, saved_ms) for name in sorted(self._unsaved - large)]
        self._unsaved = large
        needed = [self._tenants[name].saved for name in large]
        needed += [told.offset for told in self._told.values()] + [stray.offset for stray in self._strays.values()]
        before, self._mark = self._mark, LedgerSaved("", self._tier, self._next, saved_ms, min([self._next, *needed]))
        news = rows or (before.through, before.start) != (self._mark.through, self._mark.start)
        return [*rows, self._mark] if news else []

    def _may_come_again(self, told: _Told, committed: int) -> bool:
        """The record itself, if it is uncommitted and in this partition, or what was told of it."""
        here = self._partition in (None, told.source.partition)
        return (here and told.source.offset >= committed) or told.offset >= self._next - RECALLED_RECORDS

    def unsaved(self, rows: list[LedgerSaved]) -> None:
        """These rows were not written: the next `save` brings their tenants again."""
        for row in rows:
            if row.tenant:
                self._unsaved.add(row.tenant)
                self._tenants[row.tenant].saved = 0  # nobody knows which of them the log has

    def _row(self, name: str, saved_ms: int) -> LedgerSaved:
        tenant = self._tenants[name]
        tenant.saved = self._next
        counters = dict(tenant.counters)
        for taken in tenant.pending.values():  # the log doesn't say so yet
            counters.update(ledger.withdraw(counters, taken.hold))
        return LedgerSaved(
            name,
            self._tier,
            self._next,
            saved_ms,
            counters=tuple(_saved(scope, counter) for scope, counter in sorted(counters.items())),
            open=tuple(_held(request_id, opened) for request_id, opened in tenant.open.items()),
        )

    def _lapse(self) -> None:
        """A reservation whose ending can't come any more is charged in full. Every request gets an ending: this is for a log that lost one."""
        for name, tenant in self._tenants.items():
            gone = [key for key, opened in tenant.open.items() if opened.last_ms + LAPSE_MS <= self._now_ms]
            for request_id in gone:
                hold = tenant.open.pop(request_id).hold
                tenant.counters.update(ledger.settle(tenant.counters, hold, hold.cost.tokens))
                self._unsaved.add(name)


def _pop_pending(tenant: _Tenant, event: Verdict) -> Taken | None:
    """What was let in here because of the same record."""
    taken = tenant.pending.get(event.request_id)
    return tenant.pending.pop(event.request_id) if taken is not None and taken.admitted.source == event.source else None


def is_void(event: InferenceAdmitted, told_ms: int) -> bool:
    """Whether the log took an admission too late: whoever wrote it may not have had the partition any more, and another decides anew."""
    return 0 < event.valid_until_ms < told_ms


def cost(event: InferenceAdmitted) -> Cost:
    """What an admitted request may use at most."""
    return Cost(event.reserved_tokens)


def used_tokens(event: InferenceCompleted | InferenceFailed) -> int:
    """Prompt + generated, as folded: 0 for what never started."""
    return event.usage.prompt_tokens + event.usage.completion_tokens if event.usage is not None else 0


def _last_ms(event: InferenceAdmitted) -> int:
    return event.deadline_ms + (event.time_limit_ms or 0)


def _saved(scope: str, counter: Counter) -> SavedCounter:
    windows = counter.minute.slots, counter.day.slots, counter.month.slots
    return SavedCounter(
        scope,
        counter.clock_ms,
        counter.running,
        counter.held,
        *windows,
        counter.requests_total,
        counter.tokens_total,
    )


def _counter(saved: SavedCounter) -> Counter:
    return Counter(
        clock_ms=saved.clock_ms,
        running=saved.running,
        held=saved.held,
        minute=Charges.of(saved.minute),
        day=Charges.of(saved.day),
        month=Charges.of(saved.month),
        requests_total=saved.requests_total,
        tokens_total=saved.tokens_total,
    )


def _held(request_id: str, opened: _Open) -> SavedHold:
    made = opened.hold
    return SavedHold(
        request_id,
        made.charged_ms,
        made.cost.tokens,
        made.cost.requests,
        made.cost.running,
        opened.last_ms,
        made.scopes,
        opened.reply,
    )


def _open(saved: SavedHold) -> _Open:
    hold = Hold(saved.charged_ms, Cost(saved.tokens, saved.requests, saved.running), saved.scopes)
    return _Open(hold, saved.last_ms, saved.reply)
