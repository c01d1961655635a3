"""Who may have an answer from the cache, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.accounts import Accounts
from decisions.admission import AFTER_TOKENISING, PLACING, RESOLVING
from decisions.cache import (
    parse,
    stream,
    verdict,
)
from decisions.cases import judge, tokenised
from decisions.ledger import Cost
from decisions.queues import pool_name
from decisions.quota import Reserved
from decisions.verdicts import admitted, as_decided, scheduled
from schemas.events import (
    InferenceCompleted,
    Quota,
    Sampling,
    TenantChanged,
)
from schemas.reasons import Reason
from tests.decisions.caching import GREEDY, OTHER_ID, PROMPT, VERSION, answer, decide, key, noted, of_age, world
from tests.decisions.worlds import NOW, FakeGrant, FakeWorld, case, worker


@given(st.integers(-10_000, 200_000), st.one_of(st.none(), st.integers(0, 200)), st.integers(1, 100_000))
def test_a_hit_is_never_older_than_the_version_and_the_caller_allow(
    age_ms: int, max_age_s: int | None, ttl_ms: int
) -> None:
    policy = parse(None if max_age_s is None else f"max-age={max_age_s}")
    found, why = verdict(of_age(age_ms), policy, ttl_ms, NOW)
    assert why
    if found is not None:
        assert found == max(0, age_ms) < ttl_ms
        assert max_age_s is None or found <= max_age_s * 1_000
    else:
        assert age_ms >= ttl_ms or (max_age_s is not None and age_ms > max_age_s * 1_000) or max_age_s == 0


def test_a_hit_needs_no_worker_and_no_tokens() -> None:
    at = world()
    at.seen = [worker("a", {0: 0}, slots=1, running=90, service_ms=60_000.0)]
    at.tenants["acme"] = replace(
        at.tenants["acme"],
        quotas=(Quota("interactive", tokens_per_minute=5, concurrent_requests=1, requests_per_minute=2),),
    )
    found, refusal = decide(case(sampling=GREEDY), at, of_age(7))
    assert refusal is None
    assert noted(found) == ("hit", f"7 ms old, of request {OTHER_ID}")
    assert [decision.check for decision in found.decisions][-3:] == ["cache", "quota", "place"]
    assert found.reserved is not None and found.reserved.hold.cost == Cost(0, 1, 0)
    _, told = admitted(found)
    assert (told.cached, told.reserved_tokens) == (True, 0)
    _, refusal = decide(case(sampling=GREEDY), at)
    assert refusal is not None, "without the answer there is no room for it"


def test_by_setting_a_hit_costs_what_it_cost_to_generate() -> None:
    found, refusal = decide(case(sampling=GREEDY), world(cache_hit_cost="tokens"), of_age(7))
    assert refusal is None and found.reserved is not None
    assert found.reserved.hold.cost == Cost(7, 1, 0)
    assert admitted(found)[1].reserved_tokens == 7


@pytest.mark.parametrize(
    ("sampling", "control", "outcome", "stored", "shared"),
    [
        (GREEDY, None, "hit", True, True),
        (GREEDY, "no-cache", "miss", True, False),
        (GREEDY, "max-age=0", "miss", True, False),
        (GREEDY, "max-age=1", "miss", True, False),
        (GREEDY, "no-store", "hit", False, False),
        (GREEDY, "no-store, no-cache", "miss", False, False),
        (replace(GREEDY, temperature=0.5), None, "passed over", False, False),
    ],
)
def test_what_is_read_and_what_is_kept(
    sampling: Sampling, control: str | None, outcome: str, stored: bool, shared: bool
) -> None:
    found, refusal = decide(case(sampling=sampling, cache_control=control), world(), of_age(1_500))
    assert refusal is None
    assert noted(found)[0] == outcome
    work = scheduled(found)
    assert (bool(work.cache_key), work.shared) == (stored, shared)
    assert work.cache_key in ("", key(work, VERSION))


def test_a_model_without_a_cache_has_nothing_to_note() -> None:
    found, refusal = decide(case(sampling=GREEDY), world(cache_ttl_ms=0), of_age(1))
    assert refusal is None
    assert "cache" not in [decision.check for decision in found.decisions]
    assert (found.cache_key, scheduled(found).cache_key, admitted(found)[1].cached) == ("", "", False)


def test_the_list_as_a_whole_is_its_two_parts() -> None:
    assert (*RESOLVING, *PLACING) == AFTER_TOKENISING


def test_a_promoted_version_finds_nothing_of_its_predecessor() -> None:
    before, _ = decide(case(sampling=GREEDY), world())
    after, _ = decide(case(sampling=GREEDY), _promoted())
    assert before.cache_key and after.cache_key and before.cache_key != after.cache_key


def _promoted() -> FakeWorld:
    at = world(version="v2")
    at.topics["work.m.v2.interactive"] = 4
    return at


def test_of_one_tenant_nothing_is_found_by_another() -> None:
    at = world()
    at.tenants["other"] = replace(at.tenants["acme"], tenant="other")
    one, _ = decide(case(sampling=GREEDY), at)
    two, _ = decide(case(sampling=GREEDY, grant=FakeGrant("other")), at)
    assert one.cache_key and two.cache_key and one.cache_key != two.cache_key


def test_equal_work_goes_beside_what_runs() -> None:
    asked, _ = decide(case(sampling=GREEDY), world())
    for beside in range(4):
        found, _ = judge(replace(asked, beside=beside), world(), PLACING)
        assert found.partition == beside
    at = world()
    at.seen = at.seen[:1]
    found, _ = judge(replace(asked, beside=3), at, PLACING)
    assert found.partition in (0, 1), "its worker is gone"


def test_a_disabled_tenants_answers_are_not_told() -> None:
    at = world()
    at.tenants["acme"] = TenantChanged("acme", "salt", at.tenants["acme"].keys, 0, disabled=True)
    _, refusal = decide(case(sampling=GREEDY), at, of_age(1))
    assert refusal is not None and refusal.reason is Reason.INVALID_API_KEY


# --- what it costs, by everyone's reckoning ---------------------------------------------------------------------------


@pytest.mark.parametrize("hit_cost", ["requests", "tokens"])
def test_a_newcomer_reads_off_the_log_what_the_decider_took(hit_cost: str) -> None:
    found, _ = decide(case(sampling=GREEDY), world(cache_hit_cost=hit_cost), of_age(3))
    work, told = admitted(found)
    assert isinstance(found.reserved, Reserved)
    decider, newcomer = Accounts("interactive"), Accounts("interactive")
    decider.take(found.reserved, told)
    assert decider.open_requests("acme", pool_name("m", "v1")) == 0, "it waits for no worker"
    ended = [event for event in stream(answer(), work, 3) if isinstance(event, InferenceCompleted)]
    for offset, event in enumerate([told, *ended]):
        for accounts in (decider, newcomer):
            accounts.apply(offset, NOW + offset, event)
        assert decider.counters("acme") == newcomer.counters("acme")
        assert newcomer.queues.count(pool_name("m", "v1"), "acme") == 0
        assert all(counter.running == 0 for counter in newcomer.counters("acme").values())
    (counter,) = {id(counter): counter for counter in newcomer.counters("acme").values()}.values()
    assert (counter.requests_total, counter.tokens_total, counter.held) == (1, 7 if hit_cost == "tokens" else 0, 0)


def test_what_was_decided_before_a_crash_is_keyed_as_it_was() -> None:
    at = world()
    first, _ = decide(case(sampling=GREEDY), at, of_age(3))
    _, told = admitted(first)
    again = as_decided(tokenised(case(sampling=GREEDY), PROMPT, 257), told, at.models["m"], at)
    assert again.cache_key == first.cache_key
    assert scheduled(again) == replace(scheduled(first), rates=None)
