from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.capacity import can_guarantee, has_room, kept, reserved_percent, slots_of
from schemas.parts import Quota

CAPACITY = 20
TENANTS = st.sampled_from(["a", "b", "c", "d"])
GUARANTEES = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 10)).filter(
    lambda guaranteed: can_guarantee(CAPACITY, guaranteed)
)
STEPS = st.lists(st.tuples(TENANTS, st.integers(1, 12), st.booleans()), max_size=40)


def test_what_one_is_guaranteed_others_leave_free() -> None:
    guaranteed = {"gold": 6}
    assert has_room(10, guaranteed, {}, "other", 4)
    assert not has_room(10, guaranteed, {}, "other", 5)
    assert has_room(10, guaranteed, {"other": 4}, "gold", 6)
    assert not has_room(10, guaranteed, {"other": 4, "gold": 6}, "gold", 1)


def test_beyond_its_guarantee_a_tenant_shares_what_is_free() -> None:
    assert has_room(10, {"gold": 2}, {"gold": 2, "other": 3}, "gold", 5)
    assert not has_room(10, {"gold": 2}, {"gold": 2, "other": 3}, "gold", 6)
    assert has_room(10, {"gold": 2}, {"gold": 5}, "other", 5)


def test_no_more_is_promised_than_there_is() -> None:
    assert can_guarantee(10, {"a": 6, "b": 4})
    assert not can_guarantee(10, {"a": 6, "b": 5})
    assert not can_guarantee(10, {"a": 0})


@given(GUARANTEES, STEPS)
def test_a_guarantee_is_kept_whatever_others_do_and_the_pool_is_never_overfull(
    guaranteed: dict[str, int], steps: list[tuple[str, int, bool]]
) -> None:
    in_use: Counter[str] = Counter()
    for tenant, amount, returns in steps:
        if returns:
            in_use[tenant] = max(0, in_use[tenant] - amount)
        elif has_room(CAPACITY, guaranteed, in_use, tenant, amount):
            in_use[tenant] += amount
        assert in_use.total() <= kept(guaranteed, in_use) <= CAPACITY
        for promised, least in guaranteed.items():
            assert has_room(CAPACITY, guaranteed, in_use, promised, least - in_use[promised])


@pytest.mark.parametrize(
    ("percents", "slots", "kept_for"),
    [
        ({"a": 25}, 16, {"a": 4}),
        ({"a": 25}, 2, {"a": 1}),
        ({"a": 1, "b": 1}, 8, {"a": 1, "b": 1}),
        ({"a": 60, "b": 40}, 3, {"a": 2, "b": 1}),
        ({"a": 30, "b": 30, "c": 30}, 2, {"a": 1, "b": 1}),
        ({}, 8, {}),
    ],
)
def test_a_share_is_kept_of_each_workers_slots(percents: dict[str, int], slots: int, kept_for: dict[str, int]) -> None:
    assert slots_of(percents, slots) == kept_for


@given(st.dictionaries(TENANTS, st.integers(1, 25)), st.integers(1, 64))
def test_a_worker_never_keeps_more_than_it_has_nor_less_than_was_promised(percents: dict[str, int], slots: int) -> None:
    found = slots_of(percents, slots)
    assert can_guarantee(slots, found) or not found
    if sum(math.ceil(slots * percent / 100) for percent in percents.values()) <= slots:
        assert all(found[who] * 100 >= slots * percent for who, percent in percents.items())


def test_what_is_reserved_counts_for_its_own_tier_and_model_alone() -> None:
    quotas = [Quota("interactive", "", "m", reserved_percent=30), Quota("interactive", "", "m2", 5)]
    assert reserved_percent(quotas, "interactive", "m") == 30
    assert reserved_percent(quotas, "batch", "m") == 0
    assert reserved_percent(quotas, "interactive", "m2") == 0
