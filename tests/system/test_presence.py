"""Front doors that are gone, and those that only seem to be: whose call keeps its tenant's slot, and whose makes way for the next."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from decisions.verdicts import YIELDED_TEXT
from infra import ports
from schemas.events import InferenceAdmitted, InferenceFailed, Quota
from schemas.topics import LIFECYCLE
from tests.bridge.told import Told
from tests.system.audit import Audit, Story
from tests.system.running import MODEL, RunningStack
from tests.system.test_quotas import GIVEN_BACK_S, body, post, served_soon, tenant, told
from tests.system.test_resume import Door, ids

pytestmark = pytest.mark.timeout(240)
SOON_S = 6.0
"""Far sooner than the answers here end by themselves; by the rule it is little over a second, and the next call's own time."""
SILENT_S = 4.0
"""Longer than a front door that is there is ever silent."""
CONTINUE = {"X-Headrace-On-Disconnect": "continue"}
_numbers = itertools.count()


class Victim:
    """A front door of its own, which may come to harm."""

    def __init__(self, stack: RunningStack, name: str, port: int) -> None:
        self.stack, self.name, self.port = stack, name, port
        self.url = f"http://127.0.0.1:{port}"

    def kill(self) -> None:
        self.stack.kill(self.name)

    def stop(self) -> None:
        self.stack.stop(self.name)


@pytest.fixture
def victim(stack: RunningStack) -> Iterator[Victim]:
    name, port = f"victim-{next(_numbers)}", ports.free_port()
    stack.add(name, "bridge", "--port", str(port), HEADRACE_BRIDGE_DRAIN_MS="500")
    stack.await_ready(name)
    yield Victim(stack, name, port)
    stack.remove(name)


@pytest.fixture
def limited(stack: RunningStack) -> str:
    """A new tenant that may ask one thing at a time; its name."""
    name = f"one-at-once-{secrets.token_hex(4)}"
    stack.keys[name] = tenant(stack, name, Quota("interactive", concurrent_requests=1, tokens_per_day=100_000))
    stack.until(lambda: served_soon(stack, stack.keys[name]), GIVEN_BACK_S)
    return name


class LongCall:
    """A caller in a thread, of an answer that takes minutes unless it is told otherwise; what it hears until its connection ends."""

    def __init__(
        self,
        victim: Victim,
        name: str,
        how: str = "stream",
        chunks: int = 900,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._victim, self._key, self._headers = victim, victim.stack.keys[name], headers
        self._mark = secrets.token_hex(8)
        self._chunks, self.heard = chunks, list[str]()
        self._audit = Audit(victim.stack)
        ask = {"stream": self._stream, "whole": self._whole, "socket": self._socket}[how]
        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()
        victim.stack.until(lambda: sum(self.story.stream.accepted) >= 6 if self._stories() else 0)

    def _body(self, *, stream: bool) -> dict[str, Any]:
        return body(MODEL, token_ms=200, repeat=self._chunks, max_tokens=2_000, stream=stream, mark=self._mark)

    def _stream(self) -> None:
        headers = {"authorization": f"Bearer {self._key}", **self._headers}
        with httpx.Client(base_url=self._victim.url, headers=headers, timeout=240, trust_env=False) as http:
            try:
                with http.stream("POST", "/v1/chat/completions", json=self._body(stream=True)) as answer:
                    self.heard.extend(answer.iter_lines())
            except httpx.TransportError:
                return

    def _whole(self) -> None:
        headers = {"authorization": f"Bearer {self._key}", **self._headers}
        with httpx.Client(base_url=self._victim.url, headers=headers, timeout=240, trust_env=False) as http:
            try:
                self.heard.append(http.post("/v1/chat/completions", json=self._body(stream=False)).text)
            except httpx.TransportError:
                return

    def _socket(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        chat = {name: given for name, given in self._body(stream=True).items() if name != "stream"}
        asked = {"type": "request", "id": "a", "endpoint": "chat.completions", "body": chat}
        url = f"ws://127.0.0.1:{self._victim.port}/v1/stream"
        try:
            with connect(url, additional_headers=headers, proxy=None) as socket:
                socket.send(json.dumps(asked))
                self.heard.extend(str(message) for message in socket)
        except ConnectionClosed:
            return

    def _stories(self) -> dict[str, Story]:
        return {name: story for name, story in self._audit.stories().items() if self._mark in str(story.asked)}

    @property
    def request_id(self) -> str:
        (found,) = self._stories()
        return found

    @property
    def story(self) -> Story:
        return self._stories()[self.request_id]

    def goes_on(self) -> None:
        """Returns when it has made more than it has now."""
        before = sum(self.story.stream.accepted)
        self._victim.stack.until(lambda: sum(self.story.stream.accepted) > before)
        assert not self.story.endings

    def end(self) -> None:
        """Returns when its caller hears nothing more."""
        self._thread.join(60)
        assert not self._thread.is_alive()


def ask(stack: RunningStack, name: str) -> httpx.Response:
    """An ordinary call at another front door."""
    return post(stack, stack.keys[name], body(MODEL))


def refused(stack: RunningStack, name: str) -> None:
    answer = ask(stack, name)
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "rate_limited"
    assert 1 <= int(answer.headers["retry-after"]) <= 60  # as long as an answer of this model takes, about


def cancel(stack: RunningStack, name: str, request_id: str) -> None:
    assert stack.http(name).delete(f"/v1/streams/{request_id}").status_code < 300
    stack.ended(request_id)


def assert_made_way(stack: RunningStack, name: str, call: LongCall) -> None:
    """It ended as its tenant's next came, and nothing of it is left, here or there."""
    stack.ended(call.request_id)
    (ending,) = stack.events(call.request_id, "InferenceFailed", LIFECYCLE)
    assert isinstance(ending.event, InferenceFailed) and ending.event.usage is not None
    assert (ending.event.reason, ending.event.message) == ("cancelled", YIELDED_TEXT)
    story = call.story
    assert ending.event.usage.completion_tokens == sum(story.stream.accepted) < 1_800
    stack.until(lambda: stack.reports(MODEL)[-1].running == 0)
    stack.until(lambda: told(stack, name)[0]["running"] == 0)


def assert_charged(stack: RunningStack, name: str, audit: Audit) -> None:
    """The tenant's ledger is at rest, and says what was delivered since it was made."""
    delivered = 0
    for story in audit.settled().values():
        if story.admitted is not None and story.admitted.tenant == name:
            delivered += story.admitted.prompt_tokens + sum(story.stream.accepted)
    (usage,) = told(stack, name)
    assert (usage["tokens"], usage["running"], usage["reserved_tokens"]) == (delivered, 0, 0)


@pytest.fixture
def audit(stack: RunningStack) -> Audit:
    return Audit(stack)


@pytest.mark.parametrize("how", ["stream", "whole", "socket"])
def test_a_killed_front_doors_call_makes_way_for_its_tenants_next(
    stack: RunningStack, audit: Audit, limited: str, victim: Victim, how: str
) -> None:
    """litellm#27955: one at once, and the answer would have taken three minutes."""
    call = LongCall(victim, limited, how)
    victim.kill()
    began_s = time.monotonic()
    answer = ask(stack, limited)
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - began_s < SOON_S
    assert_made_way(stack, limited, call)
    (admitted,) = stack.events(answer.headers["x-request-id"], "InferenceAdmitted")
    assert isinstance(admitted.event, InferenceAdmitted)
    assert any(step.check == "slot" and call.request_id in step.detail for step in admitted.event.decisions)
    assert_charged(stack, limited, audit)


def test_what_a_front_door_left_when_it_stopped_makes_way(
    stack: RunningStack, audit: Audit, limited: str, victim: Victim
) -> None:
    """Its stream goes on for a caller who comes back, and until the tenant has something else to ask."""
    call = LongCall(victim, limited)
    victim.stop()
    call.end()
    call.goes_on()
    assert ask(stack, limited).status_code == 200
    assert_made_way(stack, limited, call)
    assert_charged(stack, limited, audit)


def test_a_stream_that_is_taken_up_elsewhere_keeps_its_slot(
    stack: RunningStack, audit: Audit, limited: str, victim: Victim
) -> None:
    call = LongCall(victim, limited, chunks=60)
    victim.kill()
    call.end()
    other = Door(stack, stack.base_url)
    with resuming(other, call.request_id, limited) as taken_up:
        time.sleep(SILENT_S)  # so long its own door is silent by then
        refused(stack, limited)
    assert Told().hear(taken_up()).texts == {0: "ab" * 60}
    stack.until(lambda: served_soon(stack, stack.keys[limited]), GIVEN_BACK_S)
    assert_charged(stack, limited, audit)


@contextmanager
def resuming(door: Door, request_id: str, name: str) -> Iterator[Callable[[], Any]]:
    """Reads a stream from its start, beside the block, and to its end; gives its events then."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(door.resume(request_id, tenant=name)), daemon=True)
    thread.start()

    def events() -> Any:
        thread.join(60)
        ((status, told),) = found
        assert status == 200 and ids(told)
        return told

    yield events


def test_a_call_that_is_to_go_on_without_its_caller_keeps_its_slot(
    stack: RunningStack, limited: str, victim: Victim
) -> None:
    call = LongCall(victim, limited, headers=CONTINUE)
    victim.kill()
    time.sleep(SILENT_S)
    refused(stack, limited)
    call.goes_on()
    cancel(stack, limited, call.request_id)


def test_a_front_door_that_is_there_keeps_its_calls(stack: RunningStack, limited: str, victim: Victim) -> None:
    """Whoever else asks, however often, and while admission is frozen for longer than a door is silent."""
    call = LongCall(victim, limited)
    until_s = time.monotonic() + SILENT_S
    while time.monotonic() < until_s:
        refused(stack, limited)
    stack.pause("admission-interactive")
    asking = threading.Thread(target=lambda: answers.append(ask(stack, limited).status_code), daemon=True)
    answers: list[int] = []
    asking.start()
    time.sleep(SILENT_S)
    stack.resume("admission-interactive")
    asking.join(60)
    assert answers == [429]
    refused(stack, limited)
    call.goes_on()
    cancel(stack, limited, call.request_id)
    call.end()


def test_a_frozen_front_door_keeps_its_call_until_its_tenant_asks(
    stack: RunningStack, audit: Audit, limited: str, victim: Victim
) -> None:
    call = LongCall(victim, limited)
    stack.pause(victim.name)
    time.sleep(SILENT_S)
    stack.resume(victim.name)
    stack.until(lambda: ask(stack, limited).status_code == 429)
    call.goes_on()
    stack.pause(victim.name)
    assert ask(stack, limited).status_code == 200
    assert_made_way(stack, limited, call)
    stack.resume(victim.name)
    call.end()
    assert any(YIELDED_TEXT in line for line in call.heard)
    headers = {"authorization": f"Bearer {stack.keys[limited]}"}
    again = f"{victim.url}/v1/chat/completions"
    assert httpx.post(again, json=body(MODEL), headers=headers, timeout=60, trust_env=False).status_code == 200
    assert_charged(stack, limited, audit)
