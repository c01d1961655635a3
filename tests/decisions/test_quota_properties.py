"""What holds of every tenant's limits, whatever it asks and when."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from decisions.ledger import GRAIN_MS, STEP_BACK_MS, Cost
from decisions.quota import (
    EACH,
    ENDING_WAIT_MS,
    LIMIT_MAX,
    gauges,
    limits_for,
)
from schemas.parts import Quota
from schemas.topics import DAY_MS, INTERACTIVE, MINUTE_MS
from tests.decisions.ledgers import FORWARD, GAPS, ONE_LIMIT, Asked, Tenant, Truth, check_limits, quota
from tests.decisions.worlds import NOW

REQUESTS_MAX = 8
LIMITS = st.builds(
    Quota,
    st.just(INTERACTIVE),
    st.sampled_from(["", EACH, "k1"]),
    st.sampled_from(["", EACH]),
    requests_per_minute=st.none() | st.integers(1, REQUESTS_MAX),
    tokens_per_minute=st.none() | st.integers(1, 60),
    concurrent_requests=st.none() | st.integers(1, 6),
    tokens_per_day=st.none() | st.integers(1, 200),
    tokens_per_month=st.none() | st.integers(1, 400),
)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 20_000) | st.integers(-STEP_BACK_MS, 1_000) | st.sampled_from([0, 60_000, DAY_MS]),
        st.integers(0, 30),
        st.sampled_from(["k1", "k2"]),
        st.none() | st.integers(0, 30),
    ),
    max_size=30,
)


def driven(quotas: list[Quota], steps: list[tuple[int, int, str, int | None]]) -> tuple[Tenant, int]:
    """A tenant after these steps (a gap, tokens asked for, a key, what it used if it has ended), and the last moment."""
    tenant, at = Tenant(*quotas), 0
    for gap, tokens, key, used in steps:
        at = max(0, at + gap)
        if tenant.ask(tokens, at, key) is None and used is not None:
            tenant.end(-1, min(tokens, used))
    return tenant, at


@given(st.lists(LIMITS, max_size=4), STEPS, st.integers(0, 30), st.data())
def test_a_refused_request_is_let_in_when_it_was_told_and_not_a_millisecond_before(
    quotas: list[Quota], steps: list[tuple[int, int, str, int | None]], tokens: int, data: st.DataObject
) -> None:
    tenant, at = driven(quotas, steps)
    answers = (tenant.ask(tokens, at) for _ in range(REQUESTS_MAX))
    refusal = next((answer for answer in answers if answer is not None), None)
    if refusal is None or refusal.retry_after_ms is None:
        return
    assert refusal.retry_after_ms > 0
    held = any(
        gauge.retry_ms(amount, NOW + at) != gauge.wait_ms(amount, NOW + at)
        for gauge in gauges(tenant.counters, limits_for(tenant.quotas, "k1", "m"), NOW + at)
        for amount in [Cost(tokens).amount(gauge.kind.unit)]
    )
    left = tenant.idle(used=not held)  # where it waits for what is given back, too, something is
    assert left.ask(tokens, at + refusal.retry_after_ms) is None
    last_ms = refusal.retry_after_ms - 1
    for earlier in (last_ms, data.draw(st.integers(0, last_ms))):
        tenant.refused(tokens, at + earlier)


@given(st.lists(LIMITS, max_size=4), STEPS)
def test_what_headers_call_remaining_is_let_in_and_no_more(
    quotas: list[Quota], steps: list[tuple[int, int, str, int | None]]
) -> None:
    quotas = [replace(one, concurrent_requests=None) for one in quotas]
    tenant, at = driven(quotas, steps)
    told = tenant.rates(at)
    if told.requests is not None and told.requests.remaining == 0:
        tenant.refused(0, at)
        return
    if told.tokens is not None:
        tenant.refused(told.tokens.remaining + 1, at)
        assert tenant.ask(told.tokens.remaining, at) is None
        after = tenant.rates(at).tokens
        assert after is not None and after.remaining == 0


@given(st.lists(LIMITS, max_size=4), STEPS)
def test_at_the_moment_of_reset_all_of_it_is_free_and_not_before(
    quotas: list[Quota], steps: list[tuple[int, int, str, int | None]]
) -> None:
    tenant, at = driven(quotas, steps)
    told = tenant.rates(at)
    for rate, unit in ((told.requests, "requests"), (told.tokens, "tokens")):
        if rate is None or rate.reset_ms == ENDING_WAIT_MS:
            continue
        now_ms = NOW + at + rate.reset_ms
        idle = gauges(tenant.idle().counters, limits_for(quotas, "k1", "m"), now_ms)
        assert rate.limit in {one.remaining for one in idle if one.kind.unit == unit}


@given(
    ONE_LIMIT,
    ONE_LIMIT.map(lambda limits: replace(limits, key_id=EACH)),
    st.lists(
        st.tuples(GAPS, st.integers(1, 30), st.sampled_from(["k1", "k2"]), st.sampled_from([None, 3, 15, 30, 30, 30])),
        min_size=5,
        max_size=25,
    ),
)
@settings(max_examples=200)
def test_no_limit_is_passed_in_any_window(
    whole: Quota, each: Quota, steps: list[tuple[int, int, str, int | None]]
) -> None:
    quotas = (whole, each)
    tenant, truths, at, newest = Tenant(*quotas), list[Truth](), 0, 0
    for gap, tokens, key, used in steps:
        at = max(0, at + gap, newest - STEP_BACK_MS + 1)
        newest = max(newest, at)
        if tenant.ask(tokens, at, key) is None:
            truths.append(Truth(Asked(NOW + at, "", tokens, key)))
            if used is not None:
                tenant.end(-1, used)
                truths[-1].used = min(tokens, used)
            check_limits(truths, quotas, NOW + newest)


@given(
    st.one_of(
        st.builds(quota, requests_per_minute=st.integers(1, 4)), st.builds(quota, tokens_per_minute=st.integers(20, 60))
    ),
    st.lists(st.tuples(FORWARD, st.integers(1, 20), st.sampled_from([None, 3, 20, 20])), max_size=25),
)
def test_nothing_is_refused_that_had_room(limits: Quota, steps: list[tuple[int, int, int | None]]) -> None:
    """A charge counts for a minute, and at most a slot's width more."""
    tenant, truths, at = Tenant(limits), list[Truth](), 0
    for gap, tokens, used in steps:
        at += gap
        last_ms = NOW + at - MINUTE_MS - GRAIN_MS
        counted = [truth for truth in truths if truth.asked.at_ms > last_ms or truth.used is None]
        requests = sum(truth.asked.at_ms > last_ms for truth in truths)
        if tenant.ask(tokens, at) is not None:
            assert requests + 1 > (limits.requests_per_minute or LIMIT_MAX) or (
                sum(truth.charged for truth in counted) + tokens > (limits.tokens_per_minute or LIMIT_MAX)
            )
            continue
        truths.append(Truth(Asked(NOW + at, "", tokens, "k1")))
        if used is not None:
            tenant.end(-1, used)
            truths[-1].used = min(tokens, used)
