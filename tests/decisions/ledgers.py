"""Tenants' ledgers for tests: driven as the shell drives them, in one process (`Tenant`) and through crashes (`Site`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from decisions import reservations as rows_of
from decisions.ledger import STEP_BACK_MS, Charges, Cost, Counter, Hold, Window, settle, span
from decisions.quota import Exceeded, Quota, Rates, gauges, limits_for, rates, reserve
from decisions.reservations import Reservation, Standing
from schemas.events import InferenceAdmitted, InferenceFailed, InferenceRejected, Position, Reply, Usage
from schemas.topics import HOUR_MS, INTERACTIVE, MINUTE_MS, TOKENS
from tests.decisions.worlds import NOW

TIMEOUT_MS = 30_000
FORWARD = st.one_of(
    st.integers(0, 2_000), st.integers(0, 20_000), st.integers(MINUTE_MS - STEP_BACK_MS, MINUTE_MS + 2_000)
)
GAPS = st.one_of(
    st.integers(0, 20_000),
    st.integers(-STEP_BACK_MS, 2_000),
    st.integers(MINUTE_MS - STEP_BACK_MS, MINUTE_MS + 2_000),
    st.sampled_from([0, 12 * HOUR_MS]),
)
"""Milliseconds from one request to the next: bursts, steps back, about a window, and half a day."""


def quota(key_id: str = "", model: str = "", tier: str = INTERACTIVE, **limits: Any) -> Quota:
    return Quota(tier, key_id, model, **limits)


ONE_LIMIT = st.one_of(
    st.builds(quota, requests_per_minute=st.integers(1, 4)),
    st.builds(quota, tokens_per_minute=st.integers(20, 60)),
    st.builds(quota, tokens_per_minute=st.integers(20, 60)),
    st.builds(quota, concurrent_requests=st.integers(1, 3)),
    st.builds(quota, tokens_per_day=st.integers(50, 150)),
    st.builds(quota, tokens_per_month=st.integers(100, 200)),
)
"""A quota of all keys and models with a single limit: of several, one would hide another."""


def settled_all(counter: Counter) -> Counter:
    """As if all that runs had ended, having used all it held."""

    def spent(charges: Charges) -> Charges:
        slots = tuple(replace(slot, spent=slot.spent + slot.held, held=0) for slot in charges.slots)
        return Charges(slots, charges.requests, sum(slot.spent for slot in slots))

    return replace(
        counter, held=0, running=0, minute=spent(counter.minute), day=spent(counter.day), month=spent(counter.month)
    )


class Tenant:
    """A tenant's counters, and each request's hold. Moments count from NOW on."""

    def __init__(self, *quotas: Quota) -> None:
        self.quotas = quotas
        self.counters: dict[str, Counter] = {}
        self.holds: list[Hold] = []

    def ask(self, tokens: int = 0, at: int = 0, key: str = "k1", model: str = "m") -> Exceeded | None:
        found = reserve(self.counters, limits_for(self.quotas, key, model), Cost(tokens), NOW + at)
        if isinstance(found, Exceeded):
            return found
        self.counters |= found.changed
        self.holds.append(found.hold)
        return None

    def refused(self, tokens: int = 0, at: int = 0, **who: str) -> Exceeded:
        before = dict(self.counters)
        refusal = self.ask(tokens, at, **who)
        assert refusal is not None
        assert self.counters == before
        return refusal

    def end(self, index: int, used: int) -> None:
        self.counters |= settle(self.counters, self.holds[index], used)[1]

    def idle(self) -> Tenant:
        """The same tenant once all that runs has ended, having used all it held."""
        other = Tenant(*self.quotas)
        other.counters = {scope: settled_all(counter) for scope, counter in self.counters.items()}
        return other

    def rates(self, at: int = 0, key: str = "k1", model: str = "m") -> Rates:
        return rates(gauges(self.counters, limits_for(self.quotas, key, model), NOW + at), NOW + at)


# --- what an outsider notes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A record of `requests.interactive`."""

    at_ms: int
    request_id: str
    tokens: int
    key: str


@dataclass
class Truth:
    """One admission: what it reserved by which record, and what it used, once it ended. Places are in the changelog."""

    asked: Asked
    place: int = 0
    used: int | None = None
    settled_place: int = -1

    @property
    def charged(self) -> int:
        return self.asked.tokens if self.used is None else self.used


def check_limits(truths: Sequence[Truth], quotas: Iterable[Quota], newest_ms: int) -> None:
    """By the records' own times: every window of a minute, every day and month, and what runs now keep to quotas of all keys or of each."""
    for limits in quotas:
        for key in {truth.asked.key for truth in truths} if limits.key_id else ("",):
            counted = [truth for truth in truths if key in ("", truth.asked.key)]
            _check_windows(counted, limits)
            running = [truth for truth in counted if truth.used is None]
            recent = [
                truth for truth in counted if truth.asked.at_ms > newest_ms - MINUTE_MS and truth.used is not None
            ]
            _within(limits.concurrent_requests, len(running))
            _within(limits.tokens_per_minute, sum(truth.charged for truth in (*running, *recent)))


def _check_windows(truths: Sequence[Truth], limits: Quota) -> None:
    for last_ms in {truth.asked.at_ms for truth in truths}:
        minute = [truth.charged for truth in truths if last_ms - MINUTE_MS < truth.asked.at_ms <= last_ms]
        _within(limits.requests_per_minute, len(minute))
        _within(limits.tokens_per_minute, sum(minute))
        for window, limit in ((Window.DAY, limits.tokens_per_day), (Window.MONTH, limits.tokens_per_month)):
            opened_ms, closed_ms = span(window, last_ms)
            _within(limit, sum(truth.charged for truth in truths if opened_ms <= truth.asked.at_ms < closed_ms))


def _within(limit: int | None, used: int) -> None:
    assert limit is None or used <= limit


# --- through crashes -------------------------------------------------------------------------------------------------


def admitted(request_id: str, offset: int, tokens: int, at_ms: int, key: str = "k1") -> InferenceAdmitted:
    source, reply = Position("requests.interactive", 0, offset), Reply(TOKENS, 0)
    deadline_ms = at_ms + TIMEOUT_MS
    return InferenceAdmitted(
        request_id, "acme", key, "m", "v1", INTERACTIVE, reply, "work", 0, 0, tokens, tokens, at_ms, deadline_ms, source
    )


def rejected(request_id: str, refusal: Exceeded | None = None) -> InferenceRejected:
    message, retry_after_ms = (refusal.message, refusal.retry_after_ms) if refusal is not None else ("", None)
    return InferenceRejected(
        request_id, "acme", "m", INTERACTIVE, "rate_limited", message, retry_after_ms=retry_after_ms
    )


def ending(request_id: str, used: int | None) -> InferenceFailed:
    usage = Usage(used - used // 2, used // 2) if used is not None else None
    return InferenceFailed(request_id, "acme", "m", "v1", INTERACTIVE, "cancelled", "", usage=usage)


@dataclass
class Site:
    """One partition's admission with its two inputs and its changelog, all in memory. It can lose everything that isn't in the log.

    `durable` is how much of the changelog the broker is known to have; of the rest, any part may survive a crash. Work is sent, and offsets
    committed, only for what is durable.
    """

    quotas: tuple[Quota, ...]
    requests: list[Asked] = field(default_factory=list)
    endings: list[InferenceFailed] = field(default_factory=list)
    changelog: list[tuple[str, Any]] = field(default_factory=list)
    durable: int = 0
    heads: tuple[int, int] = (0, 0)
    committed: tuple[int, int] = (0, 0)
    rows: dict[str, Reservation] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    truths: list[Truth] = field(default_factory=list)
    newest_ms: int = NOW

    # --- the inputs ---

    def ask(self, request_id: str, tokens: int, key: str, gap_ms: int) -> None:
        """Append a request; time goes on, or back a little."""
        last_ms = self.requests[-1].at_ms if self.requests else NOW
        at_ms = max(last_ms + gap_ms, self.newest_ms - STEP_BACK_MS + 1)
        self.newest_ms = max(self.newest_ms, at_ms)
        self.requests.append(Asked(at_ms, request_id, tokens, key))

    def sent(self) -> list[str]:
        """Requests that a worker may have: they stand, and their row was confirmed before their work was sent."""
        kept = {key.removeprefix("row ") for key, _ in self.changelog[: self.durable]}
        return [request_id for request_id, row in self.rows.items() if row.stands and request_id in kept]

    # --- the process ---

    def take_request(self) -> Standing | None:
        offset, other = self.heads
        if offset == len(self.requests):
            return None
        self.heads = offset + 1, other
        asked = self.requests[offset]
        found = rows_of.standing(self.rows.get(asked.request_id), offset)
        if found is Standing.NEW:
            self._decide(asked, offset)
        return found

    def _decide(self, asked: Asked, offset: int) -> None:
        limits = limits_for(self.quotas, asked.key, "m")
        found = reserve(self.counters, limits, Cost(asked.tokens), asked.at_ms)
        if isinstance(found, Exceeded):
            refused = rows_of.rejected(rejected(asked.request_id, found), offset, asked.at_ms + TIMEOUT_MS)
            return self._write(asked.request_id, refused, {})
        self.truths.append(Truth(asked, len(self.changelog)))
        event = admitted(asked.request_id, offset, asked.tokens, asked.at_ms, asked.key)
        return self._write(asked.request_id, rows_of.admitted(event, found.hold), found.changed)

    def take_ending(self) -> bool:
        other, offset = self.heads
        if offset == len(self.endings):
            return False
        self.heads = other, offset + 1
        event = self.endings[offset]
        row, changed = rows_of.ended(self.rows.get(event.request_id), event, self.newest_ms, self.counters)
        if changed:
            truth = next(one for one in reversed(self.truths) if one.asked.request_id == event.request_id)
            assert event.usage is not None
            truth.used = min(event.usage.prompt_tokens + event.usage.completion_tokens, truth.asked.tokens)
            truth.settled_place = len(self.changelog)
        if row is not None:
            self._write(event.request_id, row, changed)
        return True

    def sweep(self) -> None:
        read = [asked.at_ms for asked in self.requests[: self.heads[0]]]
        for request_id, row in list(self.rows.items()):
            if read and rows_of.droppable(row, read[-1], self.committed[0], self.saved()):
                del self.rows[request_id]
                self.changelog.append((f"row {request_id}", None))

    def saved(self) -> dict[str, int]:
        """By scope, how far the counters are that the broker is known to have."""
        kept = [(key, value) for key, value in self.changelog[: self.durable] if key.startswith("counter ")]
        return {key.removeprefix("counter "): counter.seq for key, counter in kept}

    def save(self) -> None:
        """Write the counters; otherwise only the rows are written."""
        self.changelog += [(f"counter {scope}", counter) for scope, counter in self.counters.items()]

    def flush(self, *, commit: bool) -> None:
        self.durable = len(self.changelog)
        if commit:
            self.committed = self.heads

    def crash(self, survives: float) -> None:
        """Lose the process and what the broker didn't get; start again from the changelog and the committed offsets."""
        end = self.durable + int(survives * (len(self.changelog) - self.durable + 0.99))
        del self.changelog[end:]
        tables = {key: value for key, value in self.changelog if value is not None}
        for key, value in self.changelog:
            tables.pop(key, None) if value is None else tables.__setitem__(key, value)
        self.rows = {key.removeprefix("row "): row for key, row in tables.items() if key.startswith("row ")}
        self.counters = {key.removeprefix("counter "): one for key, one in tables.items() if key.startswith("counter ")}
        self.heads = self.committed
        self.truths = [truth for truth in self.truths if truth.place < end]
        for truth in self.truths:
            if truth.settled_place >= end:
                truth.used, truth.settled_place = None, -1
        self.counters |= rows_of.repair(self.counters, self.rows.values())
        self.durable = end

    def _write(self, request_id: str, row: Reservation, changed: dict[str, Counter]) -> None:
        self.rows[request_id] = row
        self.changelog.append((f"row {request_id}", row))
        self.counters |= changed
