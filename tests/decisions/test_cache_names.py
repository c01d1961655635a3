"""Under which name an answer is kept, and what a caller says of the cache."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.cache import (
    Policy,
    parse,
)
from schemas.events import (
    InferenceScheduled,
    ModelVersionRegistered,
    Position,
    Rates,
    Reply,
    Sampling,
)
from schemas.reasons import Reason
from tests.decisions.caching import GREEDY, VERSION, WORK, decide, key, world
from tests.decisions.worlds import case

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
