"""What is done to a running stack, and when: a pure function of a seed, so that a failure can be had again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

WORKERS = ("worker-1", "worker-2", "worker-3", "worker-4")
ADMISSIONS = ("admission-a", "admission-b")
ENDINGS = ("endings-a", "endings-b")
CLOCKS = ("lifecycle",)
BRIDGES = ("bridge-a", "bridge-b")
BROKER = "broker"
WORKER = "worker"

FIRST_S = 2.0
"""When the first thing happens; streams flow by then."""
FROZEN_S = 9.0
"""Longer than the session of workers, admission and endings (`fragile.SESSION_MS`)."""
BRIDGE_FROZEN_S = 3.0
"""A front door has no session; its callers see a pause."""
CYCLE_S_MIN = 30.0
"""Nothing is killed more often: the supervisor gives up what ends too often."""
GROWS_AT, BRANCHES_AT, SHRINKS_AT = 0.1, 0.35, 0.75
"""When workers go from one to two, to four and back to one, as shares of the time."""
BROKER_AT = (0.3, 0.65)


class Act(Enum):
    """What can be done."""

    START = "start"
    STOP = "stop"
    KILL = "kill"
    FREEZE = "freeze"
    WAKE = "wake"
    RESTART = "restart"
    CRASH = "crash"


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One thing done to one target, so many seconds after the beginning."""

    at_s: float
    act: Act
    target: str

    def __str__(self) -> str:
        """As a log line."""
        return f"{self.at_s:6.1f} s  {self.act.value} {self.target}"


_HURTS: tuple[tuple[Act, Sequence[str]], ...] = (
    (Act.KILL, (WORKER,)),
    (Act.FREEZE, (WORKER,)),
    (Act.KILL, BRIDGES[:1]),
    (Act.KILL, BRIDGES[1:]),
    (Act.FREEZE, BRIDGES),
    (Act.KILL, ADMISSIONS),
    (Act.FREEZE, ADMISSIONS),
    (Act.KILL, ENDINGS),
    (Act.FREEZE, ENDINGS),
    (Act.KILL, CLOCKS),
    (Act.FREEZE, CLOCKS),
)


def plan(seed: int, duration_s: float) -> list[Step]:
    """Every step in order of time. The first worker and everything else run before; all that is frozen wakes before the end.

    Each kind of process is killed and frozen at least once; the broker is restarted once in good order and once by kill -9.
    """
    rng = random.Random(seed)
    survivor = rng.choice(WORKERS)
    steps = _scaling(rng, duration_s, survivor) + _broker(rng, duration_s)
    last_s = duration_s - FROZEN_S - 1
    cycles = max(1, int((last_s - FIRST_S) / CYCLE_S_MIN))
    gap_s = (last_s - FIRST_S) / (cycles * len(_HURTS))
    at_s = FIRST_S
    frozen: dict[str, float] = {}
    for _ in range(cycles):
        for act, among in rng.sample(_HURTS, len(_HURTS)):
            when_s = at_s + rng.uniform(0, gap_s)
            targets = _workers(when_s, duration_s, survivor) if among == (WORKER,) else among
            awake = [name for name in targets if frozen.get(name, -1) < when_s]
            target = rng.choice(awake or list(targets))
            steps.append(Step(when_s, act, target))
            if act is Act.FREEZE:
                wakes_s = when_s + (BRIDGE_FROZEN_S if target in BRIDGES else FROZEN_S)
                frozen[target] = wakes_s
                steps.append(Step(wakes_s, Act.WAKE, target))
            at_s += gap_s
    return sorted(steps, key=lambda step: step.at_s)


def _scaling(rng: random.Random, duration_s: float, survivor: str) -> list[Step]:
    """Workers 1 → 2 → 4 → 1."""
    steps = [Step(GROWS_AT * duration_s, Act.START, WORKERS[1])]
    steps += [Step(BRANCHES_AT * duration_s, Act.START, name) for name in WORKERS[2:]]
    leavers = [name for name in WORKERS if name != survivor]
    rng.shuffle(leavers)
    return steps + [Step(SHRINKS_AT * duration_s + i, Act.STOP, name) for i, name in enumerate(leavers)]


def _broker(rng: random.Random, duration_s: float) -> list[Step]:
    acts = [Act.RESTART, Act.CRASH]
    rng.shuffle(acts)
    return [
        Step((share + rng.uniform(-0.05, 0.05)) * duration_s, act, BROKER)
        for share, act in zip(BROKER_AT, acts, strict=True)
    ]


def _workers(at_s: float, duration_s: float, survivor: str) -> Sequence[str]:
    """Those that run and are not stopped before they could be awake again."""
    if at_s + FROZEN_S >= SHRINKS_AT * duration_s:
        return (survivor,)
    if at_s < GROWS_AT * duration_s + 1:
        return WORKERS[:1]
    return WORKERS[:2] if at_s < BRANCHES_AT * duration_s + 1 else WORKERS
