"""A worker that is told to stop hands its answers over: callers get all of them, and no attempt counts as a failure."""

from __future__ import annotations

import pytest

from tests.system.audit import Audit
from tests.system.callers import Load
from tests.system.fixtures_models import SESSION_MS
from tests.system.running import RunningStack

pytestmark = pytest.mark.timeout(240)
CALLS = 48
LEAVER = "busy-leaver"
DRAIN_MS = 200
"""Much shorter than an answer."""


def holds_partitions(stack: RunningStack, model: str) -> bool:
    """Whether the worker that will leave has told of its share, so that it is given some of the calls."""
    return any(report.partitions for report in stack.reports(model) if report.worker_id == LEAVER)


def test_a_worker_that_stops_hands_its_answers_over(stack: RunningStack, busy: str) -> None:
    env = {"HEADRACE_WORKER_SESSION_TIMEOUT_MS": str(SESSION_MS), "HEADRACE_WORKER_DRAIN_MS": str(DRAIN_MS)}
    stack.add(LEAVER, "worker", busy, "1", HEADRACE_WORKER_WORKER_ID=LEAVER, **env)
    stack.await_ready(LEAVER)
    stack.until(lambda: holds_partitions(stack, busy))
    audit = Audit(stack)
    load = Load(stack, busy, calls=CALLS, tokens=50, token_ms=200)
    load.until_flowing(CALLS // 2)
    leaver = stack.supervisor.status()[-1]
    stack.remove(LEAVER)
    assert next(each for each in stack.supervisor.status() if each.name == leaver.name).exit_status == 0
    heard = load.heard()
    assert all(call.whole for call in heard), [call for call in heard if not call.whole]
    stories = audit.settled()
    assert len(stories) == CALLS
    handed_over = [story for story in stories.values() if len(story.attempts) > 1]
    assert handed_over
    assert [story.stream.failures for story in stories.values()] == [0] * CALLS
