"""The takeover protocol holds in every interleaving, and each rule is needed: broken, the check finds a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decisions.stream import Input, StreamState, fold
from decisions.takeover import Plan, Reading, decide
from schemas.events import Attempt, GenerationStarted, GenerationTakenOver, Sampling, TokensGenerated
from tests.decisions.takeover_model import Rules, Violation, explore


def second_start_wins(state: StreamState, event: Input) -> tuple[StreamState, bool]:
    """A start of any attempt becomes current."""
    if isinstance(event, GenerationStarted) and state.closed is None:
        return replace(state, attempt=event.attempt, started=True, accepted=state.accepted or (0,)), True
    return fold(state, event)


def no_attempt_check(state: StreamState, event: Input) -> tuple[StreamState, bool]:
    """Tokens of any attempt are accepted if they follow."""
    if isinstance(event, TokensGenerated) and state.attempt is not None and state.accepted:
        event = replace(event, attempt=state.attempt)
        after, counted = fold(replace(state, started=True), event)
        return (replace(after, started=state.started), True) if counted else (state, False)
    return fold(state, event)


def any_marker(state: StreamState, event: Input) -> tuple[StreamState, bool]:
    """A former owner's late marker becomes current again."""
    if isinstance(event, GenerationTakenOver) and state.closed is None:
        return replace(state, attempt=event.attempt, started=False), True
    return fold(state, event)


def release_frees(state: StreamState, event: Input) -> tuple[StreamState, bool]:
    """What was released may be started by anyone, unfenced, and goes on from what the owner had then."""
    if isinstance(event, GenerationStarted) and state.released and state.closed is None:
        return replace(state, attempt=event.attempt, released=False), True
    return fold(state, event)


def begins_again(reading: Reading, attempt: Attempt, sampling: Sampling, failures_max: int) -> Plan:
    """A new owner goes on from nothing."""
    plan = decide(reading, attempt, sampling, failures_max)
    return replace(plan, accepted=((),) * len(plan.accepted))


@pytest.mark.parametrize(
    "rules",
    [
        Rules(tokens=1, reassignments=2),
        Rules(tokens=2, reassignments=1),
        Rules(tokens=3, reassignments=1),
        Rules(tokens=1, reassignments=2, failures_max=1),
        Rules(tokens=2, reassignments=1, releases=True),
    ],
)
def test_the_protocol_holds_in_every_interleaving(rules: Rules) -> None:
    assert explore(rules) > 1000


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        (Rules(fold=second_start_wins), "torn"),
        (Rules(fold=no_attempt_check), "torn"),
        (Rules(fold=any_marker, tokens=1, reassignments=3), "lost"),
        (Rules(fold=release_frees, releases=True, reassignments=1), "torn"),
        (Rules(decide=begins_again), "torn"),
        (Rules(read_before_marker=True), "torn"),
        (Rules(commit_any=True), "lost"),
    ],
    ids=[
        "second_start_wins",
        "no_attempt_check",
        "any_marker",
        "release_frees",
        "begins_again",
        "read_before_marker",
        "commit_any",
    ],
)
def test_each_rule_is_needed(rules: Rules, fault: str) -> None:
    with pytest.raises(Violation, match=fault):
        explore(rules)
