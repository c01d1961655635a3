"""What was decided of each request, and what it still holds: one row of the table `reservations` a request.

A row is found by tenant and request id. It keeps the decision, refusals included, so that a record that comes again is answered again, the
same; and only what stands is settled, so that an ending that comes again changes nothing.

Each decision is one record in the changelog: the row. A counter's row need not be written each time, for `repair` puts back what it lacks. When
it is, it comes after the rows of all its changes, in the same partition or once they are confirmed, so that a crash leaves no counter ahead of
them. A request's work is sent when its row is confirmed, so that there is no work without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from decisions import ledger
from decisions.ledger import Counter, Counters, Hold, Settlement
from schemas.events import InferenceAdmitted, InferenceCompleted, InferenceFailed, InferenceRejected
from schemas.topics import HOUR_MS

LAPSE_MS = 2 * HOUR_MS
"""So long after its deadline a request's stream is no longer in `tokens` (its retention), so nobody can tell its ending any more."""
ENDED_KEEP_MS = 2 * HOUR_MS
"""How long an ending without a reservation is remembered: its request may still come."""
NO_OFFSET = -1

Ending = InferenceCompleted | InferenceFailed
Changed = dict[str, Counter]


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request's row.

    Attributes:
        offset: where the record is that was decided; `NO_OFFSET` if only its ending was heard.
        keep_until_ms: the row is kept at least until then, by the time of the partition's records: the deadline.
        admitted, rejected: the decision as it was told; neither if the ending came first.
        hold: what was reserved, if it was admitted.
        settled: what became of that; None while it stands.
    """

    offset: int
    keep_until_ms: int
    admitted: InferenceAdmitted | None = None
    rejected: InferenceRejected | None = None
    hold: Hold | None = None
    settled: Settlement | None = None

    @property
    def stands(self) -> bool:
        """Whether it still holds something."""
        return self.hold is not None and self.settled is None


class Standing(StrEnum):
    """What a record that asks is to a tenant's rows."""

    NEW = "new"
    """Nothing is known of it: decide."""
    REDELIVERED = "redelivered"
    """This very record was decided before a crash: tell the same again, and if it stands, send its work again."""
    REPEATED = "repeated"
    """Another record with this id was decided: it joins that one's stream."""
    ENDED = "ended"
    """Its stream was ended before it was decided (a cancel was faster): nobody hears any more, and nothing is to be done."""


def standing(row: Reservation | None, offset: int) -> Standing:
    """What to do with a request at this offset of its partition, given its id's row."""
    if row is None:
        return Standing.NEW
    if row.offset == NO_OFFSET:
        return Standing.ENDED
    return Standing.REDELIVERED if row.offset == offset else Standing.REPEATED


def admitted(event: InferenceAdmitted, hold: Hold) -> Reservation:
    """The row of a request that was let in; `hold` is what `quota.reserve` took for it."""
    return Reservation(event.source.offset, event.deadline_ms, admitted=event, hold=hold)


def rejected(event: InferenceRejected, offset: int, keep_until_ms: int) -> Reservation:
    """The row of a request that was refused: it holds nothing."""
    return Reservation(offset, keep_until_ms, rejected=event)


def ended(
    row: Reservation | None, event: Ending, ended_ms: int, counters: Counters
) -> tuple[Reservation | None, Changed]:
    """After a request's ending as `lifecycle` tells it, whoever wrote it: the new row, or None for no change, and the counters that changed.

    What was generated is charged, and the rest returns. `ended_ms` is the ending's own time. An ending of which no row is known is noted, so
    that its request, should it be decided later, reserves nothing that no ending would ever return.
    """
    if row is None:
        return Reservation(NO_OFFSET, ended_ms + ENDED_KEEP_MS), {}
    if row.hold is None or row.settled is not None:
        return None, {}
    settled, changed = ledger.settle(counters, row.hold, used_tokens(event))
    return replace(row, settled=settled), changed


def used_tokens(event: Ending) -> int:
    """Prompt + generated, as folded: 0 for what never started."""
    return event.usage.prompt_tokens + event.usage.completion_tokens if event.usage is not None else 0


def withdrawn(row: Reservation, event: InferenceRejected, counters: Counters) -> tuple[Reservation, Changed]:
    """A request that was let in and then couldn't be sent on is refused instead, and has used up nothing. Raises ValueError if it doesn't stand."""
    if row.hold is None or row.settled is not None:
        raise ValueError("only what stands can be withdrawn")
    settled, changed = ledger.withdraw(counters, row.hold)
    return replace(row, admitted=None, rejected=event, settled=settled), changed


def lapsed(row: Reservation, now_ms: int, counters: Counters) -> tuple[Reservation | None, Changed]:
    """A reservation whose ending can't come any more is charged in full. Every request gets an ending: this is for a log that lost one."""
    if row.hold is None or row.settled is not None or now_ms < row.keep_until_ms + LAPSE_MS:
        return None, {}
    settled, changed = ledger.settle(counters, row.hold, row.hold.cost.tokens)
    return replace(row, settled=settled), changed


def droppable(row: Reservation, now_ms: int, committed: int, saved: Mapping[str, int]) -> bool:
    """Whether a row is needed no more: nothing stands, its time is over, its record can't come again, and its counters are saved.

    `now_ms` is the time of the newest record of the partition, `committed` the offset to be read next after a crash, and `saved` by scope the
    `seq` of the tenant's counters as the changelog is confirmed to hold them.
    """
    if row.stands or now_ms < row.keep_until_ms or row.offset >= committed:
        return False
    return row.settled is None or all(saved.get(scope, 0) >= seq for scope, seq in row.settled.seqs.items())


def repair(counters: Counters, rows: Iterable[Reservation]) -> Changed:
    """After recovery: what a tenant's counters lack of what its rows say. Returns those that changed."""
    return ledger.repair(counters, ((row.hold, row.settled) for row in rows if row.hold is not None))
