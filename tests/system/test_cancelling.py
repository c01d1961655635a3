"""What is cancelled on purpose stops, whichever way that is said: by HTTP, on a socket, by a record. Its slot and the rest of its reservation return."""

from __future__ import annotations

import json
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from bridge.calls import new_request_id
from infra.log import EventProducer
from schemas.events import InferenceCancelled, InferenceRequested, Quota
from schemas.topics import GRANT_HEADER, requests_topic
from tests.system.asking import COMPLETIONS, body_of, call
from tests.system.audit import Audit, Story
from tests.system.running import CALL_WAIT_S, RunningStack, script
from tests.system.test_quotas import tenant, told

pytestmark = pytest.mark.timeout(180)
TOKENS, TOKEN_MS = 1_000, 100
"""Of an answer that nobody waits for: it would take a minute and more."""
ROUNDS = 12
"""Chunks of one that somebody waits for."""


class Way(ABC):
    """A caller of one tenant's, and its way to say that it wants something no more."""

    def __init__(self, stack: RunningStack, name: str) -> None:
        self.stack, self.name = stack, name

    @abstractmethod
    def ask(self, mark: str, prompt: str, model: str) -> None:
        """Asks and doesn't wait; `mark` is in the prompt."""

    @abstractmethod
    def cancel(self, mark: str, request_id: str) -> None:
        """Says so of what was asked."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what is open."""


class ByHttp(Way):
    """Streams in threads; another call cancels."""

    def __init__(self, stack: RunningStack, name: str) -> None:
        super().__init__(stack, name)
        self._threads: list[threading.Thread] = []

    def ask(self, mark: str, prompt: str, model: str) -> None:
        asked = body_of(COMPLETIONS, prompt, model, stream=True, max_tokens=TOKENS)
        self._threads.append(threading.Thread(target=call, args=(self.stack, COMPLETIONS, asked, self.name)))
        self._threads[-1].start()

    def cancel(self, mark: str, request_id: str) -> None:
        assert self.stack.http(self.name).delete(f"/v1/streams/{request_id}").is_success

    def close(self) -> None:
        for thread in self._threads:
            thread.join(CALL_WAIT_S)


class OnASocket(Way):
    """Both on one socket."""

    def __init__(self, stack: RunningStack, name: str) -> None:
        super().__init__(stack, name)
        headers = {"authorization": f"Bearer {stack.keys[name]}"}
        url = f"ws://127.0.0.1:{stack.port}/v1/stream"
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(url, additional_headers=headers, proxy=None))

    def ask(self, mark: str, prompt: str, model: str) -> None:
        asked = body_of(COMPLETIONS, prompt, model, stream=True, max_tokens=TOKENS)
        self._socket.send(json.dumps({"type": "request", "id": mark, "endpoint": "completions", "body": asked}))

    def cancel(self, mark: str, request_id: str) -> None:
        self._socket.send(json.dumps({"type": "cancel", "id": mark}))

    def close(self) -> None:
        self._open.close()


class ByRecord(Way):
    """A direct producer."""

    def ask(self, mark: str, prompt: str, model: str) -> None:
        request = InferenceRequested(new_request_id(), model, prompt=prompt)
        self.stack.thread.run(self._send(request))

    def cancel(self, mark: str, request_id: str) -> None:
        self.stack.thread.run(self._send(InferenceCancelled(request_id, self.name)))

    def close(self) -> None:
        """Nothing is open."""

    async def _send(self, event: InferenceRequested | InferenceCancelled, tier: str = "interactive") -> None:
        given = json.loads(self.stack.command("tenants", "grant", self.name, "--json").stdout)
        producer = EventProducer(self.stack.kafka, "cancel-tests")
        await producer.start()
        try:
            headers = [(GRANT_HEADER, given["grant"].encode())]
            await producer.send_and_wait(requests_topic(tier), event, key=self.name, headers=headers)
        finally:
            await producer.stop()


class ByAnotherTiersRecord(ByRecord):
    """A direct producer that cancels on the other tier's topic, whose admission knows nothing of the request."""

    def cancel(self, mark: str, request_id: str) -> None:
        self.stack.thread.run(self._send(InferenceCancelled(request_id, self.name), "batch"))


@contextmanager
def caller(stack: RunningStack, kind: type[Way], name: str) -> Iterator[Way]:
    way = kind(stack, name)
    try:
        yield way
    finally:
        way.close()


def found(audit: Audit, mark: str) -> tuple[str, Story] | None:
    """The request with this mark, as the log tells it."""
    for request_id, story in audit.stories().items():
        if story.asked is not None and mark in (story.asked.prompt or ""):
            return request_id, story
    return None


def until(stack: RunningStack, audit: Audit, mark: str, what: str) -> tuple[str, Story]:
    """The same, once it is so far."""

    def look() -> tuple[str, Story] | None:
        if (known := found(audit, mark)) is None:
            return None
        story = known[1]
        reached: dict[str, Any] = {
            "admitted": story.admitted,
            "running": sum(story.stream.accepted),
            "ended": story.endings,
        }
        return known if reached[what] else None

    known: tuple[str, Story] = stack.until(look)
    return known


@pytest.mark.parametrize("kind", [ByHttp, OnASocket, ByRecord, ByAnotherTiersRecord], ids=lambda kind: kind.__name__)
def test_what_runs_stops_and_what_is_queued_never_runs(stack: RunningStack, narrow: str, kind: type[Way]) -> None:
    name = f"canceller-{kind.__name__.lower()}"
    stack.keys[name] = tenant(stack, name, Quota("interactive", concurrent_requests=2))
    audit = Audit(stack)
    first, second = secrets.token_hex(8), secrets.token_hex(8)
    with caller(stack, kind, name) as way:
        for mark, so_far in ((first, "running"), (second, "admitted")):
            way.ask(mark, script(mark=mark, tokens=["x"], repeat=TOKENS, token_ms=TOKEN_MS), narrow)
            until(stack, audit, mark, so_far)
        assert ask(stack, narrow, name).status_code == httpx.codes.TOO_MANY_REQUESTS
        for mark in (second, first):
            request_id, _ = until(stack, audit, mark, "admitted")
            way.cancel(mark, request_id)
            _, story = until(stack, audit, mark, "ended")
            assert story.endings[0][:2] == ("failed", "cancelled")
        # There is one slot, and room for two calls: both are free again.
        last = ask(stack, narrow, name)
        assert last.json()["choices"][0]["text"] == "free" * ROUNDS
        # What was cancelled made no more from when the next had its slot, which took many times as long as a token.
        (begun,) = stack.events(last.headers["x-request-id"], "GenerationStarted")
        made = stack.events(until(stack, audit, first, "ended")[0], "TokensGenerated")
        assert made
        assert max(chunk.timestamp_ms for chunk in made) <= begun.timestamp_ms
        assert stack.until(lambda: stack.reports(narrow)[-1].running == 0)
    stories = audit.settled(scripted=False)
    (_, ran), (queued, never_ran) = (found(audit, mark) or ("", Story()) for mark in (first, second))
    assert len(stories) == 3
    assert 0 < sum(ran.stream.accepted) < TOKENS
    assert (stack.events(queued, "GenerationStarted"), sum(never_ran.stream.accepted)) == ([], 0)
    (usage,) = told(stack, name)
    assert (usage["running"], usage["reserved_tokens"]) == (0, 0)
    assert usage["tokens"] == sum(
        story.admitted.prompt_tokens + sum(story.stream.accepted)
        for story in stories.values()
        if story.admitted is not None and story.stream.accepted
    )


def ask(stack: RunningStack, model: str, name: str) -> httpx.Response:
    """Takes a second and more."""
    slow = script(tokens=["free"], repeat=ROUNDS, token_ms=TOKEN_MS)
    return stack.http(name).post("/v1/completions", json=body_of(COMPLETIONS, slow, model))
