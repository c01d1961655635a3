"""The check of a tenant's limits among those of admission."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decisions.admission import BEFORE_TOKENISING, crowded
from decisions.cases import judge
from decisions.quota import EACH, ENDING_WAIT_MS, HELD_WAIT_MS
from decisions.verdicts import admitted, rejected
from schemas.events import (
    Decision,
    Rate,
    Rates,
    Sampling,
)
from schemas.reasons import Reason
from tests.decisions.judging import ASKED, COST, PARTITION, PROMPT, decide, limited, refused, taking
from tests.decisions.ledgers import quota
from tests.decisions.worlds import NOW, FakeGrant, FakeWorld, case, worker


def test_without_limits_a_request_is_counted_all_the_same() -> None:
    found = taking(FakeWorld(), case(sampling=ASKED))
    assert not found.limited
    scheduled, admission = admitted(found)
    assert scheduled.rates is None
    assert (admission.scopes, admission.reserved_tokens) == (("",), COST)
    assert found.reserved is not None
    assert found.reserved.changed[""].held == COST
    assert found.decisions[-2] == Decision("quota", "passed", f"{COST} tokens reserved, no limits")


def test_what_has_room_is_let_in_and_told_what_is_left_after_it() -> None:
    world = limited(quota(tokens_per_minute=30, requests_per_minute=5), quota(EACH, "m", concurrent_requests=3))
    found = taking(world, case(sampling=ASKED))
    assert found.limited
    assert found.decisions[-2] == Decision("quota", "passed", f"{COST} tokens reserved, 3 limits")
    scheduled, admission = admitted(found)
    assert scheduled.rates == Rates(Rate(5, 4, 60_000), Rate(30, 30 - COST, 60_000))
    assert admission.scopes == ("", "key k1 model m")
    assert admission.reserved_tokens == COST


def test_what_has_no_room_is_refused_with_when_and_what_is_left() -> None:
    world = limited(quota(tokens_per_minute=30, requests_per_minute=5))
    taking(world, case(sampling=ASKED))
    lasting = FakeGrant(expires_ms=NOW + 60_000)
    taking(world, replace(case(sampling=ASKED, grant=lasting), requested_ms=NOW + 1))
    before = dict(world.used[PARTITION, "acme"])
    late = replace(case(sampling=ASKED, grant=lasting), requested_ms=NOW + 10_000)
    found, refusal = decide(late, world, prompt=PROMPT)
    assert refusal is not None
    assert refusal.reason is Reason.RATE_LIMITED
    assert refusal.retry_after_ms == 50_001, "both are in one second, and expire with its last"
    assert refusal.rates == Rates(Rate(5, 3, 50_001), Rate(30, 30 - 2 * COST, 50_001))
    event = rejected(found, refusal)
    assert (event.reason, event.retry_after_ms, event.rates) == ("rate_limited", 50_001, refusal.rates)
    assert event.decisions[-1] == Decision("quota", "refused", "rate_limited")
    assert world.used[PARTITION, "acme"] == before
    assert found.reserved is None


def test_what_never_has_room_is_told_no_time() -> None:
    refusal = refused(case(sampling=ASKED), limited(quota(tokens_per_day=COST - 1)))
    assert (refusal.reason, refusal.retry_after_ms) == (Reason.RATE_LIMITED, None)
    assert refusal.rates is not None and refusal.rates.tokens is not None
    assert refusal.rates.tokens.remaining == COST - 1


def test_a_tenant_without_quotas_keeps_the_default_ones_and_its_own_instead() -> None:
    tight = (quota(tokens_per_minute=COST - 1),)
    assert refused(case(sampling=ASKED), limited(default=tight)).reason is Reason.RATE_LIMITED
    assert not taking(limited(quota(tier="batch", concurrent_requests=1)), case(sampling=ASKED)).limited
    assert refused(case(sampling=ASKED), limited(quota(tier="batch"), default=tight)).reason is Reason.RATE_LIMITED
    assert taking(limited(quota(tokens_per_minute=COST), default=tight), case(sampling=ASKED)).limited
    assert not taking(limited(quota(), default=tight), case(sampling=ASKED)).limited


def test_quotas_of_another_tier_key_or_model_dont_limit() -> None:
    others = quota(tier="batch", tokens_per_day=1), quota("k2", tokens_per_day=1), quota(model="n", tokens_per_day=1)
    assert admitted(taking(limited(*others), case(sampling=ASKED)))[1].scopes == ("",)


def test_a_quota_counts_what_its_own_partition_and_tenant_have_used() -> None:
    world = limited(quota(concurrent_requests=1))
    taken = taking(world, case(sampling=ASKED))
    assert taken.reserved is not None
    world.used = {(PARTITION + 1, "acme"): taken.reserved.changed, (PARTITION, "other"): taken.reserved.changed}
    taking(world, case(sampling=ASKED))
    refusal = refused(case(sampling=ASKED), world)
    assert (refusal.retry_after_ms, refusal.rates) == (ENDING_WAIT_MS, Rates())


@pytest.mark.parametrize(
    ("service_ms", "retry_after_ms"),
    [(0.0, ENDING_WAIT_MS), (3_000.0, 3_000), (10.0, ENDING_WAIT_MS), (1e9, HELD_WAIT_MS)],
)
def test_who_asks_too_much_at_once_is_told_when_what_runs_may_have_ended(
    service_ms: float, retry_after_ms: int
) -> None:
    world = limited(quota(concurrent_requests=1))
    taking(world, case(sampling=ASKED))
    world.seen = [worker("a", {0: 0}, slots=1, service_ms=service_ms)]
    refusal = refused(case(sampling=ASKED), world)
    assert (refusal.retry_after_ms, refusal.ending) == (retry_after_ms, True)


def test_a_refused_request_is_told_how_many_must_end_before_and_after_it_is_tokenised() -> None:
    world = limited(quota(concurrent_requests=1, tokens_per_minute=2 * COST))
    assert crowded(taking(world, case(sampling=ASKED)), world) == {"": 1}
    before, _ = judge(case(sampling=ASKED), world, BEFORE_TOKENISING)
    assert crowded(before, world) == {"": 1}
    before, _ = judge(case(sampling=Sampling(max_tokens=2 * COST)), world, BEFORE_TOKENISING)
    assert crowded(before, world) == {}, "its tokens have no room either"


def test_every_choice_needs_room() -> None:
    world = limited(quota(tokens_per_minute=2 + 3 * 10))
    assert refused(case(sampling=Sampling(n=4, max_tokens=10)), world).reason is Reason.RATE_LIMITED
    found = taking(world, case(sampling=Sampling(n=3, max_tokens=10)))
    assert found.reserved is not None
    assert found.reserved.hold.cost.tokens == admitted(found)[1].reserved_tokens == 2 + 3 * 10


def test_max_tokens_left_out_reserves_all_that_is_left_of_the_context() -> None:
    assert refused(case(), limited(quota(tokens_per_minute=99))).reason is Reason.RATE_LIMITED
    assert admitted(taking(limited(quota(tokens_per_minute=100)), case()))[1].reserved_tokens == 100


def test_what_a_later_check_refuses_reserves_nothing() -> None:
    world = limited(quota(concurrent_requests=1), topics={"tokens": 8})
    for _ in range(2):
        found, refusal = decide(case(sampling=ASKED), world)
        assert refusal is not None
        assert (refusal.reason, found.decisions[-1].check) == (Reason.UNAVAILABLE, "place")
        assert found.decisions[-2].outcome == "passed"
        assert world.used == {}


def test_what_an_earlier_check_refuses_isnt_measured_by_limits() -> None:
    refusal = refused(case(sampling=Sampling(max_tokens=1_000)), limited(quota(tokens_per_minute=1)))
    assert refusal.reason is Reason.CONTEXT_LENGTH_EXCEEDED
