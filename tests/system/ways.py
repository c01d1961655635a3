"""Every way to say that a request isn't wanted any more, with the way of asking that goes with it."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import httpx
from websockets.sync.client import connect

from bridge.calls import new_request_id
from infra.log import EventProducer
from schemas.events import InferenceCancelled, InferenceRequested, Sampling
from schemas.topics import GRANT_HEADER, requests_topic
from tests.system.asking import COMPLETIONS, body_of, call
from tests.system.audit import Audit, Story
from tests.system.running import CALL_WAIT_S, RunningStack


class Way(ABC):
    """A caller of one tenant's. `sampling` goes with all that it asks."""

    def __init__(self, stack: RunningStack, name: str, **sampling: Any) -> None:
        self.stack, self.name, self.sampling = stack, name, sampling

    @abstractmethod
    def ask(self, mark: str, prompt: str, model: str) -> None:
        """Asks and doesn't wait; `mark` is in the prompt."""

    @abstractmethod
    def cancel(self, mark: str, request_id: str) -> None:
        """Says so of what was asked."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what is open."""

    def body(self, prompt: str, model: str) -> dict[str, Any]:
        """A streamed call's."""
        return body_of(COMPLETIONS, prompt, model, stream=True, **self.sampling)


class ByHttp(Way):
    """Streams in threads; another call cancels."""

    def __init__(self, stack: RunningStack, name: str, **sampling: Any) -> None:
        super().__init__(stack, name, **sampling)
        self._threads: list[threading.Thread] = []

    def ask(self, mark: str, prompt: str, model: str) -> None:
        arguments = (self.stack, COMPLETIONS, self.body(prompt, model), self.name)
        self._threads.append(threading.Thread(target=call, args=arguments))
        self._threads[-1].start()

    def cancel(self, mark: str, request_id: str) -> None:
        assert self.stack.http(self.name).delete(f"/v1/streams/{request_id}").is_success

    def close(self) -> None:
        for thread in self._threads:
            thread.join(CALL_WAIT_S)


class ByLeaving(Way):
    """Streams whose connections are closed. Asking returns once a stream has begun."""

    def __init__(self, stack: RunningStack, name: str, **sampling: Any) -> None:
        super().__init__(stack, name, **sampling)
        self._open: dict[str, httpx.Response] = {}

    def ask(self, mark: str, prompt: str, model: str) -> None:
        client = self.stack.http(self.name)
        asked = client.build_request("POST", f"/v1/{COMPLETIONS}", json=self.body(prompt, model))
        self._open[mark] = client.send(asked, stream=True)

    def cancel(self, mark: str, request_id: str) -> None:
        self._open[mark].close()

    def close(self) -> None:
        for answer in self._open.values():
            answer.close()


class OnASocket(Way):
    """Both on one socket."""

    def __init__(self, stack: RunningStack, name: str, **sampling: Any) -> None:
        super().__init__(stack, name, **sampling)
        headers = {"authorization": f"Bearer {stack.keys[name]}"}
        url = f"ws://127.0.0.1:{stack.port}/v1/stream"
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(url, additional_headers=headers, proxy=None))

    def ask(self, mark: str, prompt: str, model: str) -> None:
        asked = {"type": "request", "id": mark, "endpoint": "completions", "body": self.body(prompt, model)}
        self._socket.send(json.dumps(asked))

    def cancel(self, mark: str, request_id: str) -> None:
        self._socket.send(json.dumps({"type": "cancel", "id": mark}))

    def close(self) -> None:
        self._open.close()


class ByClosingTheSocket(OnASocket):
    """All that was asked on it goes with the socket."""

    def cancel(self, mark: str, request_id: str) -> None:
        self.close()


class ByRecord(Way):
    """A direct producer."""

    @cached_property
    def grant(self) -> bytes:
        given = json.loads(self.stack.command("tenants", "grant", self.name, "--json").stdout)
        return str(given["grant"]).encode()

    def ask(self, mark: str, prompt: str, model: str) -> None:
        request = InferenceRequested(new_request_id(), model, prompt=prompt, sampling=Sampling(**self.sampling))
        self.stack.thread.run(self._send(request))

    def cancel(self, mark: str, request_id: str) -> None:
        self.stack.thread.run(self._send(InferenceCancelled(request_id, self.name)))

    def close(self) -> None:
        """Nothing is open."""

    async def _send(self, event: InferenceRequested | InferenceCancelled, tier: str = "interactive") -> None:
        headers = [(GRANT_HEADER, self.grant)]
        producer = EventProducer(self.stack.kafka, "cancel-tests")
        await producer.start()
        try:
            await producer.send_and_wait(requests_topic(tier), event, key=self.name, headers=headers)
        finally:
            await producer.stop()


class ByAnotherTiersRecord(ByRecord):
    """A direct producer that cancels on the other tier's topic, whose admission knows nothing of the request."""

    def cancel(self, mark: str, request_id: str) -> None:
        self.stack.thread.run(self._send(InferenceCancelled(request_id, self.name), "batch"))


@contextmanager
def caller(stack: RunningStack, kind: type[Way], name: str, **sampling: Any) -> Iterator[Way]:
    way = kind(stack, name, **sampling)
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


def used(audit: Audit) -> int:
    """The tokens that are charged for all that was asked since, once all of it has ended."""
    return sum(
        story.admitted.prompt_tokens + sum(story.stream.accepted)
        for story in audit.settled(scripted=False).values()
        if story.admitted is not None and story.stream.accepted
    )
