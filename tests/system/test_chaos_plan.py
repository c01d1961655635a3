"""A plan does what it promises, whatever its seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.system.chaos_plan import ADMISSIONS, BRIDGES, BROKER, CLOCKS, ENDINGS, WORKERS, Act, plan

SHORT_S, LONG_S = 30.0, 600.0
EVERY_KIND = (WORKERS, ADMISSIONS, ENDINGS, CLOCKS, BRIDGES)


@pytest.mark.parametrize("duration_s", [SHORT_S, LONG_S])
@pytest.mark.parametrize("seed", range(25))
def test_a_plan_hurts_everything_and_leaves_nothing_frozen(seed: int, duration_s: float) -> None:
    steps = plan(seed, duration_s)
    assert steps == plan(seed, duration_s)
    assert all(0 < step.at_s < duration_s for step in steps)
    for kind in EVERY_KIND:
        for act in (Act.KILL, Act.FREEZE):
            assert any(step.act is act and step.target in kind for step in steps), (act, kind)
    assert Counter(step.act for step in steps if step.target == BROKER) == {Act.RESTART: 1, Act.CRASH: 1}
    frozen: Counter[str] = Counter()
    for step in steps:
        frozen[step.target] += {Act.FREEZE: 1, Act.WAKE: -1}.get(step.act, 0)
    assert not any(frozen.values())


@pytest.mark.parametrize("seed", range(25))
def test_workers_go_from_one_to_two_to_four_to_one(seed: int) -> None:
    counts, running = [1], {WORKERS[0]}
    stopped_s: dict[str, float] = {}
    for step in plan(seed, LONG_S):
        if step.target not in WORKERS:
            continue
        if step.act is Act.START:
            running.add(step.target)
        elif step.act is Act.STOP:
            running.remove(step.target)
            stopped_s[step.target] = step.at_s
        else:
            assert step.target in running, step
        if counts[-1] != len(running):
            counts.append(len(running))
    assert counts == [1, 2, 3, 4, 3, 2, 1]


def test_seeds_differ() -> None:
    assert plan(1, SHORT_S) != plan(2, SHORT_S)
