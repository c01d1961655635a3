"""The tenants' ledgers of one partition: a fold of `lifecycle`, and on top of it what was decided here and isn't told there yet.

`lifecycle` has the admissions, with what each reserves, and the endings, with what each used, in one order for everybody. So what a tenant has
reserved and spent is a function of the log alone: whoever reads the same records knows the same, and nothing has to be written beside them. A
decision counts at once (`take`), before its record is in the log, so that the next one sees it. Rows (`save`) only spare a newcomer the reading
of months: each holds a tenant as of an offset, and of several rows that of the highest offset holds, whoever wrote it.

`Accounts` is the bookkeeping: records in, rows out. It reads no clock and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from decisions import ledger
from decisions.endings import ADMISSION
from decisions.idempotency import KeyIndex
from decisions.ledger import Cost, Counter, Counters, Hold
from decisions.ledger_rows import Open, Row, counter_of, open_of
from decisions.queues import Queues
from decisions.queues import pool as pool_of
from decisions.quota import Reserved
from decisions.recalled import Recalled, Standing, Verdict
from schemas.events import (
    InferenceAdmitted,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceStarted,
    LedgerSaved,
    Reply,
)
from schemas.quick import quick
from schemas.topics import HOUR_MS, requests_topic

ANY_TIER = ""
"""Of an ending: the tier that has the request open."""
LAPSE_MS = 2 * HOUR_MS
"""So long after it must have ended a request's stream is no longer in `tokens` (its retention), so nobody can tell its ending any more."""
OPEN_SAVED_MAX = 20_000
"""Open requests of one tenant that its row has room for: a megabyte."""
SAVED_AGAIN_MS, SAVED_AGAIN_MS_MAX = 20, 20_000
"""A tenant's row is this much older for each request that it has open before it is written again, and no more than so much: a large row costs more
than the reading that it spares."""
Ending = InferenceCompleted | InferenceFailed


@quick
@dataclass(frozen=True, slots=True)
class Taken:
    """What a request reserves that was let in here."""

    hold: Hold
    admitted: InferenceAdmitted


@dataclass(slots=True)
class _Tenant:
    """`through`: the records below that offset are in the row it came from, 0 if it had none; `saved`: those in its newest row, of `saved_ms`.

    `open` is told by the log; `pending` was decided here and isn't yet.
    """

    through: int = 0
    saved: int = 0
    saved_ms: int = 0
    counters: dict[str, Counter] = field(default_factory=dict)
    open: dict[str, Open] = field(default_factory=dict)
    pending: dict[str, Taken] = field(default_factory=dict)


class Accounts:
    """See the module. First `restore` every row there is, then `apply` the records of `lifecycle` from `start` on."""

    def __init__(self, tier: str) -> None:
        """The ledgers of one tier: what the partition tells of others is passed over.

        Attributes:
            keys: under which keys requests were let in, as far as the records applied tell it.
        """
        self._tier = tier
        self.keys = KeyIndex(tier)
        self._source = requests_topic(tier)
        self._tenants: dict[str, _Tenant] = {}
        self._mark = Row("", tier, 0, 0)
        self._next = 0
        self._now_ms = 0
        self._recalled = Recalled()
        self._partition: int | None = None
        self._unsaved: set[str] = set()
        self.queues = Queues()

    # --- coming back ---------------------------------------------------------------------------------------------------

    def restore(self, row: LedgerSaved) -> None:
        """One row, in any order."""
        if row.tier != self._tier:
            return
        if not row.tenant:
            mark = Row("", row.tier, row.through, row.saved_ms, row.start)
            self._mark = max(self._mark, mark, key=lambda mark: (mark.through, mark.start))
        elif row.tenant not in self._tenants or row.through > self._tenants[row.tenant].through:
            self._tenants[row.tenant] = _Tenant(
                row.through,
                row.through,
                row.saved_ms,
                {saved.scope: counter_of(saved) for saved in row.counters},
                {saved.request_id: open_of(saved) for saved in row.open},
            )
            self.queues.forget(row.tenant)
            for saved in row.open:
                if not saved.begun:
                    self.queues.add(saved.pool, row.tenant, saved.request_id)

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
        self._recalled.read(self._next)
        match event:
            case InferenceAdmitted() if event.tier == self._tier and not is_void(event, timestamp_ms):
                self._admitted(offset, event)
                self.keys.admitted(event)
            case InferenceRejected() if event.tier == self._tier:
                self._rejected(offset, event)
            case InferenceStarted() if event.tier == self._tier:
                self._begun(offset, event)
            case InferenceCompleted() | InferenceFailed() if event.tier in (self._tier, ANY_TIER):
                self._ended(offset, event)
                if was_refused(event):
                    self.keys.free(event.tenant, event.request_id)
                elif isinstance(event, InferenceFailed):
                    self.keys.failed(event.tenant, event.request_id, event.reason)
            case _:
                return

    def _tenant(self, name: str) -> _Tenant:
        return self._tenants.setdefault(name, _Tenant())

    def _admitted(self, offset: int, event: InferenceAdmitted) -> None:
        """Counts once for each record that asked, and neither while the same id is open nor once it has ended: both have one stream, and one
        ending. What the later one's work makes counts for nothing there, so it uses up nothing.

        Also if a refusal was told before: one of the two was late, work was sent, and its stream says what becomes of it.
        """
        tenant = self._tenant(event.tenant)
        self._partition = event.source.partition
        counts, stray = self._recalled.admitted(offset, event)
        if offset < tenant.through:
            return
        self._unsaved.add(event.tenant)
        taken = _pop_pending(tenant, event)
        served_by = pool_of(event)
        if not counts or event.request_id in tenant.open:
            if taken is not None:
                tenant.counters.update(ledger.withdraw(tenant.counters, taken.hold))
            if event.request_id not in tenant.open:
                self.queues.remove(served_by, event.tenant, event.request_id)
            return
        if taken is not None:
            hold = taken.hold
        else:  # decided by somebody else: before this partition came here, or by a former owner that doesn't know it yet
            hold, changed = ledger.hold(tenant.counters, event.scopes, cost(event), event.requested_ms)
            tenant.counters.update(changed)
        if stray is not None:  # it stays: a newcomer has to hear of it before it hears of another admission
            tenant.counters.update(_closed(tenant.counters, hold, stray.used))
            self.queues.remove(served_by, event.tenant, event.request_id)
        else:
            tenant.open[event.request_id] = Open(
                hold, _last_ms(event), event.reply, served_by, door=event.door, key_id=event.key_id
            )
            self.queues.add(served_by, event.tenant, event.request_id)

    def _rejected(self, offset: int, event: InferenceRejected) -> None:
        """It is told that nothing was let in, and that is all: a refusal takes nothing back.

        Whoever lets a request in and another who refuses it don't know of each other. Which of them its caller hears is told by the order in
        `tokens`, and so by its ending alone (`decisions.stream`).
        """
        source = event.source
        if source is None or source.topic != self._source or self._partition not in (None, source.partition):
            return  # what can't be read is refused in whatever partition it is
        known = self._tenants.get(event.tenant)
        if known is None or event.request_id not in known.open:
            self._recalled.rejected(offset, event, source)

    def _begun(self, offset: int, event: InferenceStarted) -> None:
        """It has a slot, so it waits no longer. May be told before its admission: then it counts as waiting until it ends."""
        tenant = self._tenants.get(event.tenant)
        if tenant is None or offset < tenant.through:
            return
        opened = tenant.open.get(event.request_id)
        if opened is not None and not opened.begun:
            tenant.open[event.request_id] = replace(opened, begun=True)
            self.queues.remove(opened.pool, event.tenant, event.request_id)
            self._unsaved.add(event.tenant)

    def _ended(self, offset: int, event: Ending) -> None:
        """Of this tier alone: the same id may be asked on another, and what ends there was charged there. A cancel that came by the topic of a
        tier that doesn't know the request names none.
        """
        tenant = self._tenants.get(event.tenant)
        opened = tenant.open.pop(event.request_id, None) if tenant is not None and offset >= tenant.through else None
        if tenant is not None and opened is not None:
            self.queues.remove(opened.pool, event.tenant, event.request_id)
            self._unsaved.add(event.tenant)
            tenant.counters.update(_closed(tenant.counters, opened.hold, _used(event)))
        key = event.tenant, event.request_id
        self._recalled.ended(key, offset, _used(event), was_open=opened is not None)

    # --- deciding ------------------------------------------------------------------------------------------------------

    def standing(self, tenant: str, request_id: str, source_offset: int) -> tuple[Standing, Verdict | None]:
        """What to do with a request at this offset of its partition, and what was decided of its id."""
        known = self._tenants.get(tenant)
        if known is not None and (taken := known.pending.get(request_id)) is not None:
            same = taken.admitted.source.offset == source_offset
            return Standing.REDELIVERED if same else Standing.REPEATED, taken.admitted
        is_open = known is not None and request_id in known.open
        return self._recalled.standing((tenant, request_id), source_offset, is_open=is_open)

    def reply_of(self, tenant: str, request_id: str) -> Reply | None:
        """Where an admitted request's stream is, as far as is known."""
        known = self._tenants.get(tenant)
        if known is not None and (taken := known.pending.get(request_id)) is not None:
            return taken.admitted.reply
        if known is not None and (opened := known.open.get(request_id)) is not None:
            return opened.reply
        return self._recalled.reply_of((tenant, request_id))

    def counters(self, tenant: str) -> Counters:
        """What a tenant has reserved and spent, with what was decided here and isn't told yet."""
        known = self._tenants.get(tenant)
        return known.counters if known is not None else {}

    def opened(self, tenant: str) -> Mapping[str, Open]:
        """What of a tenant's is open, as far as it is told."""
        known = self._tenants.get(tenant)
        return known.open if known is not None else {}

    def all_opened(self) -> Iterator[tuple[str, Mapping[str, Open]]]:
        """The same of every tenant that has something open."""
        return ((name, tenant.open) for name, tenant in self._tenants.items() if tenant.open)

    def open_requests(self, tenant: str, pool: str) -> int:
        """How many of a tenant's requests in a pool are let in and haven't ended."""
        known = self._tenants.get(tenant)
        if known is None:
            return 0
        told = sum(opened.pool == pool for opened in known.open.values())
        return told + sum(pool_of(taken.admitted) == pool for taken in known.pending.values())

    def tenants(self) -> Mapping[str, Counters]:
        """The same for every tenant of which anything is known."""
        return {name: tenant.counters for name, tenant in self._tenants.items()}

    def take(self, reserved: Reserved, admitted: InferenceAdmitted) -> None:
        """A request is let in: what `quota.reserve` found counts from now on. Nothing may be decided between the two."""
        tenant = self._tenant(admitted.tenant)
        tenant.counters.update(reserved.changed)
        tenant.pending[admitted.request_id] = Taken(reserved.hold, admitted)
        self.queues.add(pool_of(admitted), admitted.tenant, admitted.request_id)

    def withdraw(self, admitted: InferenceAdmitted) -> None:
        """A request that was let in is refused after all, or was never told: it has used up nothing. Once it is told, its record counts."""
        tenant = self._tenant(admitted.tenant)
        if (taken := tenant.pending.pop(admitted.request_id, None)) is not None:
            tenant.counters.update(ledger.withdraw(tenant.counters, taken.hold))
            self.queues.remove(pool_of(admitted), admitted.tenant, admitted.request_id)

    # --- rows ----------------------------------------------------------------------------------------------------------

    def save(self, committed: int, saved_ms: int, *, last: bool = False) -> list[Row]:
        """The rows of the tenants that changed, and last the mark of the partition. They are to be written in this order.

        A tenant with more open requests than a record takes has its row later, and so has one whose last row is young for its size, unless this is
        to be the last time; until then a newcomer reads on from its last one.

        `committed` is the offset of the requests to be read next after a crash: what was decided of those below is needed no more.
        """
        if not self._next:
            return []
        self._recalled.forget(self._next, self._partition, committed)
        self._lapse()
        later = {name for name in self._unsaved if self._waits(self._tenants[name], saved_ms, last=last)}
        rows = [self._row(name, saved_ms) for name in sorted(self._unsaved - later)]
        self._unsaved = later
        needed = [self._tenants[name].saved for name in later] + self._recalled.needed()
        before, self._mark = self._mark, Row("", self._tier, self._next, saved_ms, min([self._next, *needed]))
        news = rows or (before.through, before.start) != (self._mark.through, self._mark.start)
        return [*rows, self._mark] if news else []

    def _waits(self, tenant: _Tenant, saved_ms: int, *, last: bool) -> bool:
        """Whether a tenant's row isn't written this time."""
        again_ms = tenant.saved_ms + min(len(tenant.open) * SAVED_AGAIN_MS, SAVED_AGAIN_MS_MAX)
        return len(tenant.open) > OPEN_SAVED_MAX or (tenant.saved > 0 and not last and saved_ms < again_ms)

    def unsaved(self, rows: list[Row]) -> None:
        """These rows were not written: the next `save` brings their tenants again."""
        for row in rows:
            if row.tenant:
                self._unsaved.add(row.tenant)
                self._tenants[row.tenant].saved = 0  # nobody knows which of them the log has

    def _row(self, name: str, saved_ms: int) -> Row:
        tenant = self._tenants[name]
        tenant.saved, tenant.saved_ms = self._next, saved_ms
        counters = dict(tenant.counters)
        for taken in tenant.pending.values():  # the log doesn't say so yet
            counters.update(ledger.withdraw(counters, taken.hold))
        return Row(name, self._tier, self._next, saved_ms, 0, tuple(counters.items()), tuple(tenant.open.items()))

    def _lapse(self) -> None:
        """A reservation whose ending can't come any more is charged in full. Every request gets an ending: this is for a log that lost one."""
        for name, tenant in self._tenants.items():
            gone = [key for key, opened in tenant.open.items() if opened.last_ms + LAPSE_MS <= self._now_ms]
            for request_id in gone:
                opened = tenant.open.pop(request_id)
                self.queues.remove(opened.pool, name, request_id)
                hold = opened.hold
                tenant.counters.update(ledger.settle(tenant.counters, hold, hold.cost.tokens))
                self._unsaved.add(name)


def _pop_pending(tenant: _Tenant, event: InferenceAdmitted) -> Taken | None:
    """What was let in here because of the same record."""
    taken = tenant.pending.get(event.request_id)
    return tenant.pending.pop(event.request_id) if taken is not None and taken.admitted.source == event.source else None


def is_void(event: InferenceAdmitted, told_ms: int) -> bool:
    """Whether the log took an admission too late: whoever wrote it may not have had the partition any more, and another decides anew."""
    return 0 < event.valid_until_ms < told_ms


def cost(event: InferenceAdmitted) -> Cost:
    """What an admitted request may use at most; what is answered from the response cache runs nowhere."""
    return Cost(event.reserved_tokens, running=0 if event.cached else 1)


def was_refused(event: Ending) -> bool:
    """Whether an ending says that its caller heard a refusal, whoever let the request in."""
    return isinstance(event, InferenceFailed) and event.source == ADMISSION


def _closed(counters: Counters, hold: Hold, used: int | None) -> dict[str, Counter]:
    """What an ending makes of a hold: what was refused after all has used up nothing, not even a request."""
    return ledger.withdraw(counters, hold) if used is None else ledger.settle(counters, hold, used)


def _used(event: Ending) -> int | None:
    """What an ending says was used; None if it was refused after all."""
    return None if was_refused(event) else used_tokens(event)


def used_tokens(event: Ending) -> int:
    """Prompt + generated, as folded: 0 for what never started."""
    return event.usage.prompt_tokens + event.usage.completion_tokens if event.usage is not None else 0


def _last_ms(event: InferenceAdmitted) -> int:
    return event.deadline_ms + (event.time_limit_ms or 0)
