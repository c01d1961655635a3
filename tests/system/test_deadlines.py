"""Deadlines and time limits hold whatever the workers do: here they are frozen, or never end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.models_file import ModelEntry
from tests.system.asking import COMPLETIONS, STREAMED, body_of, call
from tests.system.audit import Audit
from tests.system.fixtures_models import register, worker
from tests.system.running import RunningStack, script

pytestmark = pytest.mark.timeout(180)
BRIEF = "brief"
LIMIT_MS = 1_500


@pytest.fixture(scope="module")
def brief(stack: RunningStack) -> Iterator[str]:
    """A model whose answers may take a second and a half; it makes one at a time. Yields its name, which is its worker's too."""
    register(stack, ModelEntry(BRIEF, "1", "scripted", "scripted", 4096, slots=1, partitions=1, time_limit_ms=LIMIT_MS))
    with worker(stack, BRIEF, BRIEF) as name:
        yield name


@STREAMED
def test_the_clock_answers_for_a_worker_that_does_not(stack: RunningStack, brief: str, stream: bool) -> None:
    audit = Audit(stack)
    stack.pause(brief)
    try:
        answer = call(stack, COMPLETIONS, body_of(COMPLETIONS, "hello", brief, stream=stream, timeout=1))
    finally:
        stack.resume(brief)
    assert (answer.status, answer.error and answer.error["code"]) == (504, "deadline_exceeded")
    (story,) = audit.settled().values()
    assert story.endings[0][:2] == ("failed", "deadline_exceeded")
    assert call(stack, COMPLETIONS, body_of(COMPLETIONS, "hello", brief)).texts == {0: "hello"}


def test_an_answer_without_end_is_ended_and_its_slot_is_free_again(stack: RunningStack, brief: str) -> None:
    endless = script(tokens=["on and "], repeat=1_000, token_ms=100)
    answer = call(stack, COMPLETIONS, body_of(COMPLETIONS, endless, brief, stream=True, max_tokens=3_000))
    assert answer.status == 200
    assert answer.texts[0].startswith("on and on and ")
    assert answer.error is not None
    assert answer.error["code"] == "time_limit_exceeded"
    assert not answer.finished
    assert call(stack, COMPLETIONS, body_of(COMPLETIONS, "hello", brief)).texts == {0: "hello"}
