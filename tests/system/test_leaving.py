"""Callers who leave, and callers whose time passes in the queue: what they asked ends, and its slot is free again."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.system.asking import BOTH, CHAT, STREAMED, assert_served, body_of, call
from tests.system.audit import Audit, Story
from tests.system.fixtures_models import NARROW
from tests.system.running import RunningStack, script

pytestmark = pytest.mark.timeout(180)


class Caller:
    """A caller in a thread, whose socket can be closed at any time."""

    def __init__(self, stack: RunningStack, endpoint: str, model: str, *, stream: bool, **directions: Any) -> None:
        self.mark = secrets.token_hex(8)
        content = script(mark=self.mark, **directions)
        self._body = body_of(endpoint, content, model, stream=stream, max_tokens=2000)
        self._client = stack.http()
        self._request = self._client.build_request("POST", f"/v1/{endpoint}", json=self._body)
        self.lines = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stream = stream
        self._loop_stop = threading.Event()
        self._stack = stack
        self._thread.start()

    def _run(self) -> None:
        try:
            response = self._client.send(self._request, stream=True)
            for line in response.iter_lines():
                self.lines += line.startswith("data: ")
        except (httpx.HTTPError, httpx.StreamError, OSError, RuntimeError):
            return

    def close(self) -> None:
        """Closes the socket, whatever the thread waits for."""
        for connection in self._client._transport._pool.connections:  # type: ignore[attr-defined]
            sock = connection._connection._network_stream.get_extra_info("socket")
            sock.shutdown(2)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._client.close()


def story_of(audit: Audit, caller: Caller) -> Story | None:
    for story in audit.stories().values():
        asked = story.asked
        if asked is not None and caller.mark in (
            asked.prompt or (asked.messages[-1].content if asked.messages else "")
        ):
            return story
    return None


def running(stack: RunningStack, model: str) -> int:
    """How many requests the model's worker says it runs."""
    return stack.reports(model)[-1].running


@pytest.fixture
def audit(stack: RunningStack, narrow: str) -> Iterator[Audit]:
    yield Audit(stack)
    stack.until(lambda: running(stack, narrow) == 0)


@BOTH
@STREAMED
def test_a_caller_who_leaves_frees_the_only_slot(
    stack: RunningStack, audit: Audit, endpoint: str, stream: bool
) -> None:
    caller = Caller(stack, endpoint, NARROW, stream=stream, tokens=["x"], repeat=4000, token_ms=15)
    stack.until(lambda: caller.lines >= 3 if stream else running(stack, NARROW) == 1)
    caller.close()
    closed_s = time.monotonic()
    assert_served(stack, NARROW)  # there is one slot: it is free again
    assert time.monotonic() - closed_s < 15  # far less than the minute that the answer takes
    story = stack.until(lambda: (found := story_of(audit, caller)) and found.endings and found)
    assert story.endings[0][:2] == ("failed", "cancelled")
    assert story.endings[0][2] < 1500


@BOTH
@STREAMED
def test_a_caller_who_leaves_while_queued_never_runs(
    stack: RunningStack, audit: Audit, endpoint: str, stream: bool
) -> None:
    first = Caller(stack, CHAT, NARROW, stream=True, tokens=["x"], repeat=4000, token_ms=15)
    stack.until(lambda: first.lines >= 3)
    queued = Caller(stack, endpoint, NARROW, stream=stream, tokens=["y"], repeat=10)
    stack.until(lambda: (found := story_of(audit, queued)) and found.admitted)
    queued.close()
    story = stack.until(lambda: (found := story_of(audit, queued)) and found.endings and found)
    assert story.endings[0][:2] == ("failed", "cancelled")
    first.close()
    assert_served(stack, NARROW)
    story = story_of(audit, queued)
    assert story is not None
    assert (story.runs, story.text) == (set(), "")
    assert set(story.endings) == {("failed", "cancelled", 0)}


def test_a_call_whose_deadline_passes_in_the_queue_is_refused_then_and_never_runs(
    stack: RunningStack, audit: Audit
) -> None:
    first = Caller(stack, CHAT, NARROW, stream=True, tokens=["x"], repeat=4000, token_ms=15)
    stack.until(lambda: first.lines >= 3)
    began_s = time.monotonic()
    late = call(stack, CHAT, body_of(CHAT, "too late", NARROW, timeout=1))
    # Refused at its deadline, or at once where calls are known to take longer.
    told = (late.status, late.error and late.error["code"])
    assert told in ((504, "deadline_exceeded"), (503, "overloaded"))
    assert time.monotonic() - began_s < 10
    first.close()
    assert_served(stack, NARROW)

    def ended() -> list[Story]:
        return [
            found
            for found in audit.stories().values()
            if found.asked and found.asked.messages and found.asked.messages[-1].content == "too late"
            if found.endings or (found.stream.closed and found.stream.closed.outcome == "rejected")
        ]

    (story,) = stack.until(ended)
    assert story.runs == set()
    assert set(story.endings) <= {("failed", "deadline_exceeded", 0)}


def test_a_call_that_would_wait_beyond_its_deadline_is_refused_at_once(stack: RunningStack, audit: Audit) -> None:
    """The only slot is taken, by calls that take seconds, as its worker has reported."""
    for _ in range(2):
        assert call(stack, CHAT, body_of(CHAT, script(tokens=["x"], sleep_ms=4_000), NARROW)).status == 200
    first = Caller(stack, CHAT, NARROW, stream=True, tokens=["x"], repeat=4000, token_ms=15)
    stack.until(lambda: first.lines >= 3 and stack.reports(NARROW)[-1].service_ms > 200)
    refused = call(stack, CHAT, body_of(CHAT, "hopeless", NARROW, timeout=0.2))
    assert (refused.status, refused.error and refused.error["code"]) == (503, "overloaded")
    assert "can't begin before the deadline" in (refused.error or {})["message"]
    first.close()
    assert_served(stack, NARROW)
