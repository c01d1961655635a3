"""Which answers are kept, under which name, who may have one, what it costs, and how it is told again."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions import cache
from decisions.accounts import Accounts
from decisions.admission import AFTER_TOKENISING, BEFORE_TOKENISING, PLACING, RESOLVING
from decisions.cache import (
    BY_CACHE,
    CHUNK_TOKENS,
    CHUNKS_MAX,
    ENTRY_BYTES_MAX,
    Entry,
    Policy,
    chunks,
    may_be_kept,
    parse,
    stream,
    verdict,
)
from decisions.cases import Case, Refusal, judge, tokenised
from decisions.endings import Facts, answered, facts
from decisions.ledger import Cost
from decisions.queues import pool_name
from decisions.quota import Reserved
from decisions.stream import NEW, StreamState, fold
from decisions.verdicts import admitted, as_decided, named_for_cache, scheduled
from infra.log import BATCH_BYTES_MAX
from schemas.codec import encode, encode_json
from schemas.events import (
    Alternative,
    Attempt,
    ChoiceAnswer,
    ChoiceEnd,
    GenerationStarted,
    InferenceAnswered,
    InferenceCompleted,
    InferenceScheduled,
    ModelVersionRegistered,
    Position,
    Quota,
    Rates,
    Reply,
    Sampling,
    TenantChanged,
    Timings,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.ids import request_id
from schemas.reasons import Reason
from tests.decisions.worlds import ID, NOW, FakeGrant, FakeWorld, case, worker

GREEDY = Sampling(temperature=0.0, max_tokens=10)
VERSION = ModelVersionRegistered("m", "v1", "scripted", "", 100, partitions=4, cache_ttl_ms=60_000)
OTHER_ID = request_id(NOW - 5_000, b"0123456789")
PROMPT = (104, 105)
WORK = InferenceScheduled(
    ID, "acme", "m", "v1", "interactive", PROMPT, GREEDY, NOW + 5_000, NOW, Reply("tokens", 1), "salt"
)


def answer(text: str = "hello", **changes: Any) -> InferenceAnswered:
    ids = tuple(text.encode())
    whole = InferenceAnswered(
        OTHER_ID,
        "acme",
        "m",
        "v1",
        "batch",
        (ChoiceAnswer(0, ids, text, "stop"),),
        Usage(2, len(ids)),
        cache_key="k",
    )
    return replace(whole, **changes)


def world(**changes: Any) -> FakeWorld:
    found = FakeWorld(seen=[worker("a", {0: 0, 1: 0}), worker("b", {2: 0, 3: 0})])
    found.models["m"] = replace(VERSION, **changes)
    return found


def decide(asked: Case, at: FakeWorld, entry: Entry | None = None) -> tuple[Case, Refusal | None]:
    """What the shell does: it looks the answer up between the checks."""
    found, refusal = judge(asked, at, BEFORE_TOKENISING)
    if refusal is None:
        found, refusal = judge(tokenised(found, PROMPT, 257), at, RESOLVING)
    if refusal is not None:
        return found, refusal
    found = named_for_cache(found)
    if found.cache_key and found.policy.read:
        found = replace(found, entry=entry)
    return judge(found, at, PLACING)


def key(work: InferenceScheduled, version: ModelVersionRegistered) -> str:
    return cache.key({item.name: getattr(work, item.name) for item in dataclasses.fields(work)}, version)


def noted(found: Case) -> tuple[str, str]:
    (decision,) = [decision for decision in found.decisions if decision.check == "cache"]
    return decision.outcome, decision.detail


def of_age(ms: int) -> Entry:
    return Entry(answer(), NOW - ms)


# --- the name ---------------------------------------------------------------------------------------------------------

NOT_OF_THE_ANSWER = frozenset(
    {
        "request_id", "tier", "deadline_ms", "requested_ms", "reply", "stream", "source", "time_limit_ms", "rates",
        "cache_key", "shared",
    }
)  # fmt: skip
"""What of the work says for whom, when and where it is answered. Whatever isn't written here must change the name."""
NOT_OF_THE_MODEL = frozenset(
    {
        "slots", "partitions", "tiers", "default_timeout_ms", "created_ms", "time_limit_ms", "max_queue_depth",
        "interactive_slots", "cache_ttl_ms", "cache_bytes", "cache_hit_cost", "batched", "fixed_rows",
    }
)  # fmt: skip
"""What of a version says how it is run and who waits for it."""


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case None:
            return 1
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case tuple():
            return (*value, "x")
        case dict():
            return {**value, "7": 1.0}
        case _:
            raise AssertionError(value)


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(Sampling)])
def test_two_requests_that_differ_in_one_sampling_parameter_have_two_names(field: str) -> None:
    changed = replace(GREEDY, **{field: other(getattr(GREEDY, field))})
    assert key(replace(WORK, sampling=changed), VERSION) != key(WORK, VERSION)


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(InferenceScheduled)])
def test_whatever_of_the_work_may_change_its_answer_is_in_the_name(field: str) -> None:
    changes: dict[str, Any] = {
        "sampling": replace(GREEDY, seed=1),
        "reply": Reply("tokens", 2),
        "source": Position("requests.interactive", 1, 1),
        "rates": Rates(),
    }
    changed = replace(WORK, **{field: changes[field] if field in changes else other(getattr(WORK, field))})
    assert (key(changed, VERSION) == key(WORK, VERSION)) is (field in NOT_OF_THE_ANSWER)


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(ModelVersionRegistered)])
def test_whatever_of_the_version_may_change_its_answer_is_in_the_name(field: str) -> None:
    changed = replace(VERSION, **{field: other(getattr(VERSION, field))})
    assert (key(WORK, changed) == key(WORK, VERSION)) is (field in NOT_OF_THE_MODEL)


def test_the_order_of_a_mapping_is_no_difference() -> None:
    one, two = ({"1": 2.0, "2": 1.0}, {"2": 1.0, "1": 2.0})
    names = {key(replace(WORK, sampling=replace(GREEDY, logit_bias=bias)), VERSION) for bias in (one, two)}
    assert len(names) == 1 and all(len(name) == 64 for name in names)


@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3).map(tuple)), max_size=6, unique=True
    )
)
def test_no_two_works_have_one_name(given_: list[tuple[str, tuple[str, ...]]]) -> None:
    """Texts that meet at their borders, such as ("ab", "c") and ("a", "bc"), included."""
    works = [replace(WORK, tenant=tenant, sampling=replace(GREEDY, stop=stops)) for tenant, stops in given_]
    assert len({key(work, VERSION) for work in works}) == len(works)


# --- what the caller says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        (None, Policy()),
        ("", Policy()),
        ("no-cache", Policy(read=False)),
        ("No-Store", Policy(store=False)),
        ("no-cache, no-store", Policy(read=False, store=False)),
        ("max-age=60", Policy(max_age_ms=60_000)),
        ('max-age="60" , stale-if-error=1, private="a, b"', Policy(max_age_ms=60_000)),
        ("max-age=0", Policy(read=False, max_age_ms=0)),
        ("max-age=60, max-age=5", Policy(max_age_ms=5_000)),
        ("max-age=60, max-age=0", Policy(read=False, max_age_ms=0)),
        ("only-if-cached, no-transform,,", Policy()),
    ],
)
def test_the_words_of_http_are_understood(text: str | None, policy: Policy) -> None:
    assert parse(text) == policy


@pytest.mark.parametrize(
    "text", ["max-age", "max-age=", "max-age=-1", "max-age=1.5", "max-age=x", 'max-age="', "x" * 1_001]
)
def test_what_makes_no_sense_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)
    _, refusal = decide(case(sampling=GREEDY, cache_control=text), world())
    assert refusal is not None
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "cache_control")


@given(st.text(max_size=40))
def test_any_words_are_understood_or_refused(text: str) -> None:
    try:
        policy = parse(text)
    except ValueError:
        assert "max-age" in text.lower()
    else:
        assert policy.max_age_ms is None or policy.max_age_ms >= 0


def test_equal_work_is_shared_where_a_moments_age_is_well_taken() -> None:
    assert Policy().shares and Policy(max_age_ms=2_000).shares
    assert not any(policy.shares for policy in (Policy(read=False), Policy(store=False), Policy(max_age_ms=1_000)))


# --- who may have it --------------------------------------------------------------------------------------------------


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


# --- told again -------------------------------------------------------------------------------------------------------


def folded(events: list[Any]) -> tuple[StreamState, Facts, list[TokensGenerated]]:
    state, known, counted = NEW, Facts(), []
    for event in events:
        state, counts = fold(state, event)
        assert counts
        known = facts(known, event)
        if isinstance(event, TokensGenerated):
            counted.append(event)
    return state, known, counted


@given(st.integers(0, 400), st.text(max_size=60), st.integers(1, 3), st.booleans())
def test_an_answer_told_again_is_the_same_answer(count: int, text: str, n: int, scored: bool) -> None:
    logprobs = tuple(TokenLogprob(i, b"x", -1.0) for i in range(count)) if scored and count else None
    choices = tuple(ChoiceAnswer(i, tuple(range(count)), text, "stop", "end", logprobs) for i in range(n))
    kept = answer(choices=choices, usage=Usage(2, n * count, 1))
    events = stream(kept, replace(WORK, rates=Rates()), 1_234)
    state, known, counted = folded(events)
    last = events[-1]
    assert isinstance(last, InferenceCompleted)
    whole = answered(state, known, last, counted)
    assert whole == replace(kept, request_id=ID, tier="interactive", cache_key="")
    (begun,) = [event for event in events if isinstance(event, GenerationStarted)]
    assert (begun.cache_age_ms, begun.cache_key, begun.worker_id, begun.rates) == (1_234, "", BY_CACHE, Rates())


@given(st.integers(0, 5_000), st.text(max_size=200))
def test_a_long_answer_is_told_in_chunks_that_add_up(count: int, text: str) -> None:
    whole = TokensGenerated(ID, 0, Attempt(0, 1), 5, tuple(range(count)), text)
    found = list(chunks(whole))
    assert "".join(chunk.text for chunk in found) == text
    assert tuple(token for chunk in found for token in chunk.token_ids) == whole.token_ids
    assert [chunk.first for chunk in found] == [5 + sum(len(c.token_ids) for c in found[:i]) for i in range(len(found))]
    assert len(found) <= CHUNKS_MAX
    assert len(found) == 1 or count > CHUNK_TOKENS


def test_a_hit_is_not_kept_anew() -> None:
    state, known, counted = folded(stream(answer(), WORK, 0))
    ending = InferenceCompleted(
        ID, "acme", "m", "v1", "interactive", Attempt(0, 1), (ChoiceEnd(0, 5, "stop"),), Usage(2, 5), Timings(), ""
    )
    assert not may_be_kept(answered(state, known, ending, counted), 100)


def test_what_failed_or_is_too_large_or_has_no_name_is_not_kept() -> None:
    assert may_be_kept(answer(), ENTRY_BYTES_MAX)
    assert not may_be_kept(answer(), ENTRY_BYTES_MAX + 1)
    assert not may_be_kept(answer(cache_key=""), 100)
    assert not may_be_kept(answer(error_reason="engine_error"), 100)


def _largest(choice: ChoiceAnswer, n: int) -> InferenceAnswered:
    """An answer that is as large as may be kept, made of many of the smallest tokens."""
    each = len(encode(answer(choices=(choice,)))) / 1_000
    count = int(ENTRY_BYTES_MAX / n / each)
    times = -(-count // 1_000)
    return answer(
        choices=tuple(
            ChoiceAnswer(
                i,
                (choice.token_ids * times)[:count],
                (choice.text * times)[:count],
                "stop",
                logprobs=None if choice.logprobs is None else (choice.logprobs * times)[:count],
            )
            for i in range(n)
        )
    )


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize(
    "choice",
    [
        ChoiceAnswer(0, (1,) * 1_000, "\0" * 1_000, "stop"),
        ChoiceAnswer(0, (99_999,) * 1_000, "語" * 1_000, "stop"),
        ChoiceAnswer(0, (1,) * 1_000, "", "stop", logprobs=(TokenLogprob(1, b"", -1.2345678901234567e-100),) * 1_000),
        ChoiceAnswer(
            0,
            (1,) * 1_000,
            "\0" * 1_000,
            "stop",
            logprobs=(TokenLogprob(1, b"", -0.1234567890123456, (Alternative(1, b"", -1.2345678901234567e-100),) * 20),)
            * 1_000,
        ),
    ],
)
def test_the_largest_that_is_kept_is_one_batch_in_any_encoding(choice: ChoiceAnswer, n: int) -> None:
    kept = _largest(choice, n)
    assert len(encode(kept)) > ENTRY_BYTES_MAX * 0.9
    told = [encode_json(event) for event in stream(kept, WORK, 0)]
    assert sum(len(value) + 200 for value in told) < BATCH_BYTES_MAX


def test_a_disabled_tenants_answers_are_not_told() -> None:
    at = world()
    at.tenants["acme"] = TenantChanged("acme", "salt", at.tenants["acme"].keys, 0, disabled=True)
    _, refusal = decide(case(sampling=GREEDY), at, of_age(1))
    assert refusal is not None and refusal.reason is Reason.INVALID_API_KEY
