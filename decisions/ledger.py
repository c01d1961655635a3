"""What a tenant has reserved and spent: counters that are charged at admission and settled, in the same place, at the ending.

A charge belongs to the moment of admission: what a request reserves, and later what it used, counts from then on for a minute, and in the
day and month (UTC) that held that moment. While it stands it counts in any case, however long it runs. So in every window of a minute, and in
every day and month, reserved + spent is the sum of the charges made in it and of all that still stand.

A scope is what shares one limit: the tenant as a whole, one key, one model. Each has a `Counter`. Time is that of the records of one
partition; it may step back. A charge made after a step back is dated at the newest time seen, so it counts longer; slots are kept for
`STEP_BACK_MS` after they expire, so within that a step back forgets nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from schemas.parts import Slot
from schemas.quick import quick
from schemas.topics import DAY_MS, MINUTE_MS

GRAIN_MS = 1_000
"""Charges of one second share a slot and expire with the last of them: a minute's slots are few, and a slow caller's are exact."""
STEP_BACK_MS = 5_000
"""Time may step back so far (another broker leads the partition) with no window forgetting a charge."""
SLOTS_MAX = (MINUTE_MS + GRAIN_MS + STEP_BACK_MS) // GRAIN_MS + 1
"""The most slots that a counter keeps of one window."""
DAYS_KEPT = 64
"""Of so many days it is remembered when they, and their months, begin and end."""
ALL_KEYS_AND_MODELS = ""
"""The scope of a tenant as a whole."""


class Window(StrEnum):
    """For how long a charge counts: 60 s from its own moment on, or until the calendar's day or month ends (UTC)."""

    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"


_PLACES = {window: place for place, window in enumerate(Window)}


class Unit(StrEnum):
    """What is counted: requests and tokens over a window, and requests that run at once."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    RUNNING = "running"


_REQUESTS, _TOKENS = Unit.REQUESTS, Unit.TOKENS
_MINUTE, _DAY = Window.MINUTE, Window.DAY
"""By names of their own: to look one up in its enumeration takes as long as what is done with it, a hundred times a request."""


@quick
@dataclass(frozen=True, slots=True)
class Cost:
    """What a request takes: at admission the most it may use, in the end what it did. An answer from a cache runs nowhere."""

    tokens: int
    requests: int = 1
    running: int = 1

    def amount(self, unit: Unit) -> int:
        """How much of one unit."""
        if unit is _TOKENS:
            return self.tokens
        return self.requests if unit is _REQUESTS else self.running


def amount(slot: Slot, unit: Unit) -> int:
    """What was charged in a slot, whether it stands or is spent."""
    return slot.requests if unit is _REQUESTS else slot.spent + slot.held


@quick
@dataclass(frozen=True, slots=True)
class Charges:
    """One window's slots, oldest first (they expire in that order, too), and the sums of their requests and of what they spent."""

    slots: tuple[Slot, ...] = ()
    requests: int = 0
    spent: int = 0

    @classmethod
    def of(cls, slots: tuple[Slot, ...]) -> Charges:
        """Slots and their sums."""
        return cls(slots, sum(slot.requests for slot in slots), sum(slot.spent for slot in slots))


@quick
@dataclass(frozen=True, slots=True)
class Counter:
    """One scope's state.

    Attributes:
        clock_ms: the moment of the newest charge.
        running: requests that stand.
        held: tokens that they reserve, whenever that was.
        minute, day, month: the charges of each window.
        requests_total, tokens_total: admitted, and used by requests that have ended, since the tenant began.
    """

    clock_ms: int = 0
    running: int = 0
    held: int = 0
    minute: Charges = field(default_factory=Charges)
    day: Charges = field(default_factory=Charges)
    month: Charges = field(default_factory=Charges)
    requests_total: int = 0
    tokens_total: int = 0

    def charges(self, window: Window) -> Charges:
        """The charges of a window."""
        if window is _MINUTE:
            return self.minute
        return self.day if window is _DAY else self.month

    def used(self, window: Window, unit: Unit, now_ms: int) -> int:
        """Reserved + spent in the window that ends now: requests admitted in it, or its tokens spent and all that are held."""
        charges = self.charges(window)
        in_use = charges.requests if unit is _REQUESTS else self.held + charges.spent
        for slot in charges.slots:
            if slot.expires_ms > now_ms:
                break
            in_use -= slot.requests if unit is _REQUESTS else slot.spent
        return in_use

    def falls_to(self, most: int, window: Window, unit: Unit, now_ms: int) -> int:
        """The first moment, from now on, at which at most `most` is in use: `now_ms` if only what runs is in the way.

        Holds if no other request comes, and if what runs now has then ended. At any earlier moment more is in use, unless an ending gave
        something back. Raises ValueError for a negative `most`.
        """
        if most < 0:
            raise ValueError(f"nothing falls to {most}")
        in_use = 0
        for slot in reversed(self.charges(window).slots):
            in_use += amount(slot, unit)
            if in_use > most:
                return max(now_ms, slot.expires_ms)
        return now_ms


NEW = Counter()
Counters = Mapping[str, Counter]
"""One tenant's counters of one tier, by scope."""


@quick
@dataclass(frozen=True, slots=True)
class Hold:
    """What a request reserves, when, and in which scopes."""

    charged_ms: int
    cost: Cost
    scopes: tuple[str, ...] = (ALL_KEYS_AND_MODELS,)


def hold(counters: Counters, scopes: Iterable[str], cost: Cost, now_ms: int) -> tuple[Hold, dict[str, Counter]]:
    """Reserve in every scope, whatever its limits: `quota.reserve` judges those first. Returns the counters that changed, too."""
    before = {scope: counters.get(scope, NEW) for scope in scopes}
    charged_ms = max([now_ms, *(counter.clock_ms for counter in before.values())])
    made = Hold(charged_ms, cost, tuple(before))
    spans = _spans(charged_ms)
    return made, {scope: _charged(counter, made, spans) for scope, counter in before.items()}


def settle(counters: Counters, made: Hold, tokens: int) -> dict[str, Counter]:
    """Turn what a request holds to what it used, and return the rest to where it was taken: the counters that changed.

    No more is charged than was reserved. Raises KeyError if a scope's counter isn't there: the hold made it.
    """
    return _settle(counters, made, Cost(min(tokens, made.cost.tokens), made.cost.requests, 0))


def withdraw(counters: Counters, made: Hold) -> dict[str, Counter]:
    """Undo a hold, the request included, for it is refused after all. Otherwise as `settle`."""
    return _settle(counters, made, Cost(0, 0, 0))


def _settle(counters: Counters, made: Hold, used: Cost) -> dict[str, Counter]:
    spans = _spans(made.charged_ms)
    return {scope: _settled(counters[scope], made, used, spans) for scope in made.scopes}


def _charged(counter: Counter, made: Hold, spans: Spans) -> Counter:
    minute, day, month = spans
    return Counter(
        clock_ms=made.charged_ms,
        running=counter.running + made.cost.running,
        held=counter.held + made.cost.tokens,
        minute=_with_charge(counter.minute, minute, made),
        day=_with_charge(counter.day, day, made),
        month=_with_charge(counter.month, month, made),
        requests_total=counter.requests_total + made.cost.requests,
        tokens_total=counter.tokens_total,
    )


def _settled(counter: Counter, made: Hold, used: Cost, spans: Spans) -> Counter:
    minute, day, month = spans
    return Counter(
        clock_ms=counter.clock_ms,
        running=counter.running - made.cost.running,
        held=counter.held - made.cost.tokens,
        minute=_with_settlement(counter.minute, minute, made, used),
        day=_with_settlement(counter.day, day, made, used),
        month=_with_settlement(counter.month, month, made, used),
        requests_total=counter.requests_total + used.requests - made.cost.requests,
        tokens_total=counter.tokens_total + used.tokens,
    )


def _with_charge(charges: Charges, of_slot: Span, made: Hold) -> Charges:
    """The charge joins the newest slot or opens one, and slots that no step back can need any more are let go."""
    slots, requests, spent, gone = charges.slots, charges.requests, charges.spent, 0
    while gone < len(slots) and slots[gone].expires_ms + STEP_BACK_MS <= made.charged_ms:
        requests, spent, gone = requests - slots[gone].requests, spent - slots[gone].spent, gone + 1
    kept, cost = slots[gone:], made.cost
    opened_ms, expires_ms = of_slot
    if kept and (last := kept[-1]).opened_ms == opened_ms:
        joined = Slot(opened_ms, expires_ms, last.requests + cost.requests, last.spent, last.held + cost.tokens)
        kept = kept[:-1]
    else:
        joined = Slot(opened_ms, expires_ms, cost.requests, 0, cost.tokens)
    return Charges((*kept, joined), requests + cost.requests, spent)


def _with_settlement(charges: Charges, of_slot: Span, made: Hold, used: Cost) -> Charges:
    """The slot of the charge is corrected; if it has been let go, what was used lies outside the window."""
    opened_ms, _ = of_slot
    slots, returned = charges.slots, made.cost.requests - used.requests
    at = bisect_left(slots, opened_ms, key=_opened)
    if at == len(slots) or slots[at].opened_ms != opened_ms:
        return charges
    old = slots[at]
    held = old.held - made.cost.tokens
    new = Slot(old.opened_ms, old.expires_ms, old.requests - returned, old.spent + used.tokens, held)
    return Charges((*slots[:at], new, *slots[at + 1 :]), charges.requests - returned, charges.spent + used.tokens)


def _opened(slot: Slot) -> int:
    return slot.opened_ms


# --- time ------------------------------------------------------------------------------------------------------------


Span = tuple[int, int]
Spans = tuple[Span, Span, Span]


def span(window: Window, at_ms: int) -> Span:
    """When the slot of a charge made at a moment opened, and when that charge expires; milliseconds since 1970, UTC."""
    return _spans(at_ms)[_PLACES[window]]


def _spans(at_ms: int) -> Spans:
    return (at_ms - at_ms % GRAIN_MS, at_ms + MINUTE_MS), *_of_day(at_ms // DAY_MS)


@lru_cache(maxsize=DAYS_KEPT)
def _of_day(day: int) -> tuple[Span, Span]:
    """The spans of a day, which counts from 1970-01-01, and of its month."""
    first = _first_of_month(day)
    return (day * DAY_MS, (day + 1) * DAY_MS), (first * DAY_MS, _first_of_month(first + 31) * DAY_MS)


def _first_of_month(day: int) -> int:
    """The first day of a day's month; both count from 1970-01-01. By Howard Hinnant's `civil_from_days`, whose years begin in March."""
    day_of_era = (day + 719_468) % 146_097
    year = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year + year // 4 - year // 100)
    month = (5 * day_of_year + 2) // 153
    return day - (day_of_year - (153 * month + 2) // 5)
