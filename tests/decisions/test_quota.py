"""Whether a tenant may ask now, what it is told, and which limits can't be meant."""

from __future__ import annotations

from typing import Any

import pytest

from decisions.quota import (
    EACH,
    ENDING_WAIT_MS,
    HELD_WAIT_MS,
    KINDS,
    LIMIT_MAX,
    QUOTAS_MAX,
    check_quotas,
    duration,
    headers,
    in_force,
    limits_for,
)
from schemas.errors import HeadraceError
from schemas.parts import Quota, Rate
from schemas.reasons import Reason
from schemas.topics import BATCH, DAY_MS, INTERACTIVE, SHADOW
from tests.decisions.ledgers import Tenant, quota
from tests.decisions.worlds import NOW

MIDNIGHT = NOW - NOW % DAY_MS + DAY_MS


# --- given, when, then -----------------------------------------------------------------------------------------------


def test_fifty_calls_at_one_instant_reserve_no_more_than_the_limit() -> None:
    tenant = Tenant(quota(tokens_per_minute=100))
    answers = [tenant.ask(30) for _ in range(50)]
    assert answers[:3] == [None] * 3
    assert {refusal.retry_after_ms for refusal in answers[3:] if refusal is not None} == {60_000}
    assert answers[3:].count(None) == 0
    assert tenant.counters[""].held == 90


def test_what_an_ending_returns_is_free_at_once() -> None:
    tenant = Tenant(quota(tokens_per_minute=100))
    assert tenant.ask(100) is None
    assert tenant.refused(60).retry_after_ms == 60_000
    tenant.end(0, 40)
    assert tenant.ask(60) is None


def test_a_minute_has_no_border_at_which_a_limit_counts_twice() -> None:
    tenant = Tenant(quota(requests_per_minute=10))
    assert [tenant.ask(at=59_990) for _ in range(10)] == [None] * 10
    assert tenant.refused(at=60_010).retry_after_ms == 59_980
    assert tenant.refused(at=119_989).retry_after_ms == 1
    assert tenant.ask(at=119_990) is None


def test_a_caller_who_paces_itself_at_the_limit_is_never_refused() -> None:
    tenant = Tenant(quota(requests_per_minute=60, tokens_per_minute=600))
    for at in range(437, 600_000, 1_000):
        assert tenant.ask(10, at=at) is None
        tenant.end(-1, 10)


def test_a_second_until_a_minute_is_over_is_not_what_runs() -> None:
    tenant = Tenant(quota(requests_per_minute=1))
    assert tenant.ask(10) is None
    refusal = tenant.refused(10, at=60_000 - ENDING_WAIT_MS)
    assert (refusal.retry_after_ms, refusal.ending) == (ENDING_WAIT_MS, False)


def test_of_a_lowered_limit_as_many_must_end_as_are_too_many() -> None:
    tenant = Tenant(quota(concurrent_requests=4))
    for _ in range(4):
        assert tenant.ask(10) is None
    tenant.quotas = (quota(concurrent_requests=2),)
    refusal = tenant.refused(10)
    assert (refusal.ending, refusal.running, refusal.over) == (True, 4, 3)


def test_concurrency_is_free_when_one_has_ended() -> None:
    tenant = Tenant(quota(concurrent_requests=1))
    assert tenant.ask(10) is None
    refusal = tenant.refused(10, at=300_000)
    assert (refusal.retry_after_ms, refusal.ending) == (ENDING_WAIT_MS, True)
    assert (refusal.running, refusal.over) == (1, 1)
    assert "1 requests at once" in refusal.message
    tenant.end(0, 0)
    assert tenant.ask(10, at=300_000) is None


def test_only_where_nothing_but_what_runs_at_once_is_in_the_way_it_is_told_how_many_must_end() -> None:
    tenant = Tenant(quota(concurrent_requests=2, tokens_per_minute=100), quota(EACH, concurrent_requests=1))
    assert tenant.crowded(10) == {}
    assert tenant.ask(10) is None
    assert tenant.crowded(10) == {"key k1": 1}
    assert tenant.crowded(10, key="k2") == {}
    assert tenant.ask(10, key="k2") is None
    assert tenant.crowded(10) == {"": 1, "key k1": 1}
    assert tenant.crowded(90) == {}
    lowered = Tenant(quota(concurrent_requests=1))
    lowered.counters = tenant.counters
    assert lowered.crowded(10) == {"": 2}


def test_a_budget_is_free_again_when_its_period_ends() -> None:
    tenant = Tenant(quota(tokens_per_day=100))
    assert tenant.ask(80) is None
    tenant.end(0, 80)
    refusal = tenant.refused(30, at=1_000)
    assert refusal.retry_after_ms == MIDNIGHT - NOW - 1_000
    assert tenant.ask(30, at=MIDNIGHT - NOW) is None


def test_a_budget_that_is_only_reserved_is_asked_for_again_in_a_minute() -> None:
    tenant = Tenant(quota(tokens_per_day=100))
    assert [tenant.ask(40), tenant.ask(40)] == [None, None]
    assert tenant.refused(30).retry_after_ms == HELD_WAIT_MS
    tenant.end(0, 2)
    assert tenant.ask(30, at=HELD_WAIT_MS) is None
    tenant.end(1, 40)
    tenant.end(2, 30)
    assert tenant.refused(30, at=HELD_WAIT_MS).retry_after_ms == MIDNIGHT - NOW - HELD_WAIT_MS


def test_what_runs_over_midnight_counts_until_it_ends() -> None:
    tenant = Tenant(quota(tokens_per_day=100))
    assert tenant.ask(80) is None
    after = MIDNIGHT - NOW + 5
    assert tenant.refused(30, at=after).retry_after_ms == ENDING_WAIT_MS
    tenant.end(0, 80)
    assert tenant.ask(100, at=after) is None


def test_what_is_larger_than_a_limit_is_told_so_at_once() -> None:
    tenant = Tenant(quota(tokens_per_minute=100, concurrent_requests=1))
    assert tenant.ask(100) is None
    refusal = tenant.refused(101)
    assert refusal.retry_after_ms is None
    assert "max_tokens" in refusal.message
    assert tenant.refused(100).retry_after_ms == 60_000


def test_every_limit_that_matches_must_have_room_and_the_longest_wait_is_told() -> None:
    tenant = Tenant(quota(requests_per_minute=1), quota(key_id="k1", tokens_per_day=100))
    assert tenant.ask(80) is None
    refusal = tenant.refused(80, at=10)
    assert refusal.retry_after_ms == HELD_WAIT_MS, "the day's, of which nothing is spent yet"
    assert "key k1" in refusal.message
    assert tenant.refused(80, at=10, key="k2").retry_after_ms == 59_990


def test_each_key_and_model_is_counted_apart_and_a_name_goes_before_each() -> None:
    tenant = Tenant(
        quota(key_id=EACH, concurrent_requests=1),
        quota(key_id="k2", concurrent_requests=2),
        quota(model="m", concurrent_requests=5),
    )
    assert tenant.ask(key="k1") is None
    tenant.refused(key="k1")
    assert [tenant.ask(key="k2"), tenant.ask(key="k2")] == [None, None]
    tenant.refused(key="k2")
    assert [tenant.ask(key="k3"), tenant.ask(key="k4")] == [None, None]
    assert "model m" in tenant.refused(key="k5").message
    assert tenant.ask(key="k5", model="n") is None


def test_of_two_that_name_one_of_key_and_model_the_key_goes_first() -> None:
    quotas = [quota("k", EACH, requests_per_minute=1), quota(EACH, "m", requests_per_minute=2)]
    for order in (quotas, quotas[::-1]):
        assert limits_for(order, "k", "m")["key k model m"].requests_per_minute == 1
        assert limits_for(order, "other", "m")["key other model m"].requests_per_minute == 2
        assert set(limits_for(order, "other", "other")) == {""}


def test_the_whole_tenant_is_counted_before_it_is_limited() -> None:
    tenant = Tenant()
    assert tenant.ask(80) is None
    tenant.quotas = (quota(tokens_per_minute=100),)
    assert tenant.refused(30).retry_after_ms == 60_000


def test_a_lowered_limit_admits_nothing_until_less_is_in_use_and_never_shows_less_than_nothing() -> None:
    tenant = Tenant(quota(tokens_per_minute=100, concurrent_requests=2))
    assert tenant.ask(50, at=0) is None
    assert tenant.ask(50, at=10_000) is None
    tenant.quotas = (quota(tokens_per_minute=60, concurrent_requests=1),)
    assert tenant.rates(10_000).tokens == Rate(60, 0, 60_000)
    tenant.end(0, 50)
    tenant.end(1, 50)
    assert tenant.refused(5, at=20_000).retry_after_ms == 40_000
    assert tenant.ask(5, at=60_000) is None
    assert tenant.rates(60_000).tokens == Rate(60, 5, 60_000)


def test_what_takes_nothing_has_room_even_above_a_lowered_limit() -> None:
    tenant = Tenant(quota(tokens_per_minute=100))
    assert tenant.ask(100) is None
    tenant.quotas = (quota(tokens_per_minute=60, requests_per_minute=2),)
    assert tenant.ask(0) is None
    assert "requests a minute" in tenant.refused(0).message


def test_a_tenant_without_quotas_of_a_tier_has_the_default_ones() -> None:
    own = [quota(requests_per_minute=5)]
    default = [quota(requests_per_minute=1), quota(tier=BATCH, tokens_per_day=9), quota(EACH, tier=BATCH)]
    assert in_force(own, default, INTERACTIVE) == tuple(own)
    assert in_force(own, default, BATCH) == tuple(default[1:])
    assert in_force(own, default, SHADOW) == ()
    assert in_force([quota()], default, INTERACTIVE) == (quota(),), "no limits is a quota, too"


# --- what the caller is told -----------------------------------------------------------------------------------------


def test_headers_tell_the_limit_that_is_met_first() -> None:
    tenant = Tenant(
        quota(requests_per_minute=10, tokens_per_minute=1_000, tokens_per_month=5_000),
        quota(key_id="k1", tokens_per_minute=500),
    )
    assert tenant.ask(200) is None
    assert headers(tenant.rates(250)) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "59.75s",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "59.75s",
    }
    assert tenant.rates(250, key="k2").tokens == Rate(1_000, 800, 59_750)


def test_an_unused_limit_is_reset_already_and_no_limit_has_no_headers() -> None:
    assert headers(Tenant(quota(requests_per_minute=10)).rates()) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "10",
        "x-ratelimit-reset-requests": "0s",
    }
    assert headers(Tenant(quota(concurrent_requests=10)).rates()) == {}


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (1, "1ms"), (999, "999ms"), (1_000, "1s"), (7_660, "7.66s"), (60_000, "1m0s"), (360_000, "6m0s"),
     (93_600_500, "26h0m0.5s")],
)  # fmt: skip
def test_durations_are_gos(ms: int, text: str) -> None:
    assert duration(ms) == text


# --- limits that can't be meant --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.field)
@pytest.mark.parametrize("limit", [0, -1, LIMIT_MAX + 1, 1.5, True, "9"])
def test_a_limit_that_cant_be_meant_is_named(kind: Any, limit: Any) -> None:
    with pytest.raises(HeadraceError, match="from 1 to 1000000000000") as caught:
        check_quotas([quota(requests_per_minute=1), quota(EACH, **{kind.field: limit})])
    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_REQUEST, f"quotas[1].{kind.field}")


@pytest.mark.parametrize(
    ("quotas", "param"),
    [
        ([quota(tier="gold")], "quotas[0].tier"),
        ([quota(key_id="a b")], "quotas[0].key_id"),
        ([quota(key_id="k" * 65)], "quotas[0].key_id"),
        ([quota(), quota(model="a b")], "quotas[1].model"),
        ([quota(model="m"), quota(model="m", concurrent_requests=1)], "quotas[1]"),
        ([quota(model=f"m{index}") for index in range(QUOTAS_MAX + 1)], "quotas"),
    ],
)
def test_a_quota_that_cant_be_meant_is_named(quotas: list[Quota], param: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        check_quotas(quotas)
    assert caught.value.param == param


def test_sound_quotas_pass() -> None:
    check_quotas([quota(tier=tier, model=model) for tier in (INTERACTIVE, BATCH) for model in ("", EACH, "m-1.5")])
    check_quotas([quota(tokens_per_minute=1, requests_per_minute=LIMIT_MAX)])
