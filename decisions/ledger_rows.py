"""A tenant's row: its ledger as it stood at one offset of `lifecycle`, on its way to the log and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from decisions.ledger import Charges, Cost, Counter, Hold
from schemas.events import LedgerSaved, Reply, SavedCounter, SavedHold
from schemas.quick import quick


@quick
@dataclass(frozen=True, slots=True)
class Open:
    """`last_ms`: when it must have ended, its time limit after its deadline. `reply`: where its stream is. `pool`: what serves it. `door`: see
    `decisions.presence`. `key_id`: that of the key it was asked with.
    """

    hold: Hold
    last_ms: int
    reply: Reply | None
    pool: str = ""
    begun: bool = False
    door: str = ""
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """What a row will hold, and costs nearly nothing to take: of thousands of open requests its event takes milliseconds to make, anywhere.

    One without a tenant is the partition's mark: `start` is where a newcomer reads on.
    """

    tenant: str
    tier: str
    through: int
    saved_ms: int
    start: int = 0
    counters: tuple[tuple[str, Counter], ...] = ()
    open: tuple[tuple[str, Open], ...] = ()

    def portions(self, size: int) -> Iterator[list[SavedHold]]:
        """What it has open, so many at a time."""
        for start in range(0, len(self.open), size):
            yield list(map(_hold, self.open[start : start + size]))

    def without_open(self) -> LedgerSaved:
        """The row but for what is open."""
        return LedgerSaved(
            self.tenant,
            self.tier,
            self.through,
            self.saved_ms,
            self.start,
            counters=tuple(saved_counter(scope, counter) for scope, counter in sorted(self.counters)),
        )


def counter_of(saved: SavedCounter) -> Counter:
    """A counter as it was."""
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


def open_of(saved: SavedHold) -> Open:
    """An open request as it was."""
    hold = Hold(saved.charged_ms, Cost(saved.tokens, saved.requests, saved.running), saved.scopes)
    return Open(hold, saved.last_ms, saved.reply, saved.pool, saved.begun, saved.door, saved.key_id)


def saved_counter(scope: str, counter: Counter) -> SavedCounter:
    """A counter as it is written."""
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


def _hold(named: tuple[str, Open]) -> SavedHold:
    request_id, opened = named
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
        opened.pool,
        opened.begun,
        opened.door,
        opened.key_id,
    )
