"""What was told of late is remembered for a while, and of so many names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.recent import Recent

KEPT_MAX, KEPT_S = 8, 10.0
STEPS = st.lists(st.tuples(st.sampled_from("abcdefghijklmnop"), st.integers(0, 9), st.floats(0, 12)), max_size=60)


@given(STEPS)
def test_each_name_s_last_is_known_while_it_is_kept_and_not_for_long_after(steps: list[tuple[str, int, float]]) -> None:
    now_s = 0.0
    recent = Recent[int](KEPT_MAX, KEPT_S, lambda: now_s)
    put: list[tuple[str, int, float]] = []
    for name, told, later_s in steps:
        now_s += later_s
        recent.put(name, told)
        put.append((name, told, now_s))
        assert len(recent) <= KEPT_MAX
        for seen in "abcdefghijklmnop":
            last = next(((told, at_s, place) for place, (of, told, at_s) in enumerate(put[::-1]) if of == seen), None)
            found = recent.get(seen)
            if last is None or now_s - last[1] > 2 * KEPT_S:
                assert found is None
            elif now_s - last[1] < KEPT_S and last[2] < KEPT_MAX // 2:
                assert found == last[0]
            else:
                assert found in (None, last[0])


def test_what_falls_false_is_known_too() -> None:
    recent = Recent[int](KEPT_MAX, KEPT_S, lambda: 0.0)
    recent.put("a", 0)
    assert recent.get("a") == 0
    assert recent.get("b") is None
