"""Bad requests among good ones on a worker that dies of them: every good one is answered, and only bad ones are ended as poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.takeover import FAILURES_MAX, Action, Plan, Reading, decide
from decisions.window import Standing, Waiting, choose
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    Sampling,
    Timings,
    TokensGenerated,
    Usage,
)

GREEDY = Sampling(max_tokens=100, temperature=0.0)
SLOTS = 4
TICKS_MAX = 10_000


@dataclass
class Asked:
    """A request of `length` tokens. A bad one ends its worker when it should make token number `bad_at`."""

    number: int
    length: int
    bad_at: int | None
    tier: str
    reading: Reading = field(default_factory=Reading)
    attempt: Attempt | None = None
    plan: Plan | None = None

    @property
    def who(self) -> tuple[str, str, str, str, str]:
        return f"r{self.number}", f"t{self.number % 2}", "m", "1", self.tier

    @property
    def waiting(self) -> Waiting:
        standing = self.plan.standing if self.plan is not None else Standing.FRESH
        return Waiting(self.tier, self.who[1], 1_000, self.number, standing)

    @property
    def made(self) -> int:
        return sum(self.reading.state.accepted)

    @property
    def outcome(self) -> str | None:
        closed = self.reading.state.closed
        return None if closed is None else closed.reason or closed.outcome


class Worker:
    """One worker at a time; when it dies or leaves, the next takes all of its requests over."""

    def __init__(self, asked: list[Asked]) -> None:
        self.waiting = list(asked)
        self.running: list[Asked] = []
        self.generation = 1
        self.deaths = 0

    def fill(self) -> None:
        while len(self.running) < SLOTS:
            index = choose([one.waiting for one in self.waiting], [one.waiting for one in self.running])
            if index is None:
                break
            one = self.waiting.pop(index)
            one.attempt = one.attempt or Attempt(self.generation, one.number)
            one.reading.apply(GenerationStarted(*one.who, one.attempt, (one.made,), 1, "w"))
            if one.plan is not None and one.plan.action is Action.POISONED:
                one.reading.apply(InferenceFailed(*one.who, "poisoned", "", one.attempt, (one.made,)))
                continue
            self.running.append(one)
        alone = [one for one in self.running if one.waiting.standing is Standing.SUSPECT]
        assert not alone or len(self.running) == 1

    def step(self, choice: int) -> None:
        """One of the running makes its next token, ends, or ends the worker."""
        one = self.running[choice % len(self.running)]
        assert one.attempt is not None
        if one.bad_at == one.made:
            self.deaths += 1
            self.next_owner()
        elif one.made < one.length:
            one.reading.apply(TokensGenerated(one.who[0], 0, one.attempt, one.made, (7,), ""))
        else:
            end = ChoiceEnd(0, one.made, "stop")
            one.reading.apply(InferenceCompleted(*one.who, one.attempt, (end,), Usage(1, one.made), Timings(), "w"))
            self.running.remove(one)

    def release(self) -> None:
        """It leaves in good order."""
        for one in self.running:
            assert one.attempt is not None
            one.reading.apply(GenerationReleased(one.who[0], one.attempt, "w"))
        self.next_owner()

    def next_owner(self) -> None:
        self.generation += 1
        self.waiting, self.running = self.running + self.waiting, []
        for one in self.waiting:
            one.attempt = Attempt(self.generation, one.number)
            one.reading.apply(GenerationTakenOver(*one.who, one.attempt, "w"))
            one.plan = decide(one.reading, one.attempt, GREEDY)
            assert one.plan.action in (Action.RUN, Action.POISONED)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 4), st.none() | st.integers(0, 4), st.sampled_from(["interactive", "batch"])),
    min_size=1,
    max_size=12,
)


@given(requests=REQUESTS, schedule=st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60))
def test_only_bad_requests_are_poisoned_and_all_others_are_answered(
    requests: list[tuple[int, int | None, str]], schedule: list[tuple[int, bool]]
) -> None:
    asked = [
        Asked(number, length, None if bad_at is None or bad_at > length else bad_at, tier)
        for number, (length, bad_at, tier) in enumerate(requests)
    ]
    worker = Worker(asked)
    for choice, leaves in schedule:
        worker.fill()
        if leaves and choice == 0:
            worker.release()
        elif worker.running:
            worker.step(choice)
    for tick in range(TICKS_MAX):
        worker.fill()
        if not worker.running:
            break
        worker.step(tick)
    assert not worker.waiting
    for one in asked:
        assert one.outcome == ("completed" if one.bad_at is None else "poisoned")
        assert one.made == (one.length if one.bad_at is None else one.bad_at)
    bad = sum(one.bad_at is not None for one in asked)
    # Bad requests that run beside each other share all deaths but their last.
    assert bad + (FAILURES_MAX - 1 if bad else 0) <= worker.deaths <= FAILURES_MAX * bad


def test_a_death_costs_the_others_no_more_than_a_pause() -> None:
    """All that ran go on beside each other after one death; after two, one by one."""
    asked = [Asked(number, 3, None, "interactive") for number in range(SLOTS)]
    worker = Worker(asked)
    worker.fill()
    worker.next_owner()  # its owner was killed
    worker.fill()
    assert len(worker.running) == SLOTS
    worker.next_owner()
    worker.fill()
    assert len(worker.running) == 1


@pytest.mark.parametrize(
    ("failures_max", "standings"),
    [
        (3, [Standing.FRESH, Standing.BEGUN, Standing.SUSPECT]),
        (2, [Standing.FRESH, Standing.SUSPECT]),
        (1, [Standing.FRESH]),
        (1_000, [Standing.FRESH, Standing.BEGUN, Standing.BEGUN, Standing.BEGUN]),
    ],
)
def test_who_could_not_fail_once_more_is_a_suspect(failures_max: int, standings: list[Standing]) -> None:
    one, found = Asked(0, 3, None, "interactive"), []
    for generation in range(1, len(standings) + 1):
        attempt = Attempt(generation, 0)
        one.reading.apply(GenerationTakenOver(*one.who, attempt, "w"))
        found.append(decide(one.reading, attempt, GREEDY, failures_max).standing)
        one.reading.apply(GenerationStarted(*one.who, attempt, (0,), 1, "w"))
    assert found == standings


def test_what_was_released_goes_before_fresh_work_and_is_no_suspect() -> None:
    asked = [Asked(number, 3, None, "interactive") for number in range(1)]
    worker = Worker(asked)
    for _ in range(5):
        worker.fill()
        worker.step(0)
        worker.release()
        assert asked[0].waiting.standing is Standing.BEGUN
        if asked[0].made == 3:
            break
