from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from decisions.capacity import can_guarantee, has_room, kept

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
