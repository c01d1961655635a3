"""Tenants' ledgers for tests: counters driven directly (`Tenant`), what an outsider counts (`Truth`), and the events that tell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from decisions.ledger import STEP_BACK_MS, Charges, Cost, Counter, Hold, Unit, Window, settle, span
from decisions.quota import Exceeded, crowded, gauges, limits_for, rates, reserve
from schemas.events import (
    InferenceAdmitted,
    InferenceFailed,
    InferenceRejected,
    Position,
    Quota,
    Rates,
    Reply,
    Usage,
)
from schemas.topics import HOUR_MS, INTERACTIVE, MINUTE_MS, TOKENS, requests_topic
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


def settled_all(counter: Counter, *, used: bool = True) -> Counter:
    """As if all that runs had ended, having used all it held, or nothing."""

    def spent(charges: Charges) -> Charges:
        slots = tuple(replace(slot, spent=slot.spent + slot.held * used, held=0) for slot in charges.slots)
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

    def crowded(self, tokens: int = 0, at: int = 0, key: str = "k1", model: str = "m") -> dict[str, int]:
        return crowded(self.counters, limits_for(self.quotas, key, model), Cost(tokens), NOW + at)

    def end(self, index: int, used: int) -> None:
        self.counters |= settle(self.counters, self.holds[index], used)

    def idle(self, *, used: bool = True) -> Tenant:
        """The same tenant once all that runs has ended, having used all it held, or nothing."""
        other = Tenant(*self.quotas)
        other.counters = {scope: settled_all(counter, used=used) for scope, counter in self.counters.items()}
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
    tenant: str = "acme"


@dataclass
class Truth:
    """One admission: the record that asked, and what it used, once it ended."""

    asked: Asked
    used: int | None = None

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


def in_use(truths: Iterable[Truth], window: Window | None, unit: Unit, now_ms: int, later_ms: int = 0) -> int:
    """What these use of a window that ends now, if each was charged so much later than it asked; None: what runs."""
    found = 0
    for truth in truths:
        stands = truth.used is None
        counts = window is not None and span(window, truth.asked.at_ms + later_ms)[1] > now_ms
        if unit is Unit.RUNNING:
            found += stands
        elif unit is Unit.REQUESTS:
            found += counts
        elif stands or counts:
            found += truth.charged
    return found


# --- events ----------------------------------------------------------------------------------------------------------


def admitted(asked: Asked, offset: int = 0, scopes: tuple[str, ...] = ("",), **changes: Any) -> InferenceAdmitted:
    event = InferenceAdmitted(
        request_id=asked.request_id,
        tenant=asked.tenant,
        key_id=asked.key,
        model="m",
        version="v1",
        tier=INTERACTIVE,
        reply=Reply(TOKENS, 0),
        work_topic="work",
        work_partition=0,
        prompt_tokens=0,
        max_tokens=asked.tokens,
        reserved_tokens=asked.tokens,
        requested_ms=asked.at_ms,
        deadline_ms=asked.at_ms + TIMEOUT_MS,
        source=Position(requests_topic(INTERACTIVE), 0, offset),
        scopes=scopes,
    )
    return replace(event, **changes)


def rejected(asked: Asked, offset: int = 0, **changes: Any) -> InferenceRejected:
    source = Position(requests_topic(INTERACTIVE), 0, offset)
    event = InferenceRejected(
        asked.request_id, asked.tenant, "m", INTERACTIVE, "rate_limited", "", requested_ms=asked.at_ms, source=source
    )
    return replace(event, **changes)


def ending(
    request_id: str, used: int | None, tenant: str = "acme", tier: str = INTERACTIVE, **changes: Any
) -> InferenceFailed:
    usage = Usage(used - used // 2, used // 2) if used is not None else None
    return replace(InferenceFailed(request_id, tenant, "m", "v1", tier, "cancelled", "", usage=usage), **changes)
