"""Answers outlive the front door that carries them and the worker that makes them: callers come back, anywhere, for exactly what follows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import ports
from tests.bridge.told import Event, Events, Frames, Told
from tests.system.fixtures_models import SESSION_MS, worker
from tests.system.running import MODEL, ROOT, RunningStack, script

pytestmark = pytest.mark.timeout(240)
SECOND = "bridge-second"
CONTINUE = {"X-Headrace-On-Disconnect": "continue"}


class Door:
    """One front door, as a tenant sees it."""

    def __init__(self, stack: RunningStack, url: str) -> None:
        self._stack = stack
        self.url = url

    def _http(self, tenant: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {self._stack.keys[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def ask(self, until: int | None = None, **payload: Any) -> tuple[str, Events]:
        """A chat's stream, up to so many events with an id or as far as the connection carries."""
        body = {"stream": True, "stream_options": {"include_usage": True}, **payload}
        with (
            self._http("acme") as http,
            http.stream("POST", "/v1/chat/completions", json=body, headers=CONTINUE) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            return answer.headers["x-request-id"], read(answer, until)

    def resume(
        self, stream: str, last: str | None = None, until: int | None = None, tenant: str = "acme", **params: Any
    ) -> tuple[int, Events]:
        """A stream's rest after an event, or all of it."""
        headers = {} if last is None else {"last-event-id": last}
        path = f"/v1/streams/{stream}"
        with self._http(tenant) as http, http.stream("GET", path, headers=headers, params=params) as answer:
            return answer.status_code, read(answer, until) if answer.status_code == 200 else []


def heard(answer: httpx.Response) -> Iterator[Event]:
    """Events as they come, until the stream ends or the connection breaks."""
    frames = Frames()
    try:
        for line in answer.iter_lines():
            if (event := frames.take(line)) is not None:
                yield event
    except httpx.TransportError:
        return


def read(answer: httpx.Response, until: int | None = None) -> Events:
    """Events up to so many with an id, or all that come."""
    events: Events = []
    for event in heard(answer):
        events.append(event)
        if until is not None and len(ids(events)) >= until:
            break
    return events


def ids(events: Events) -> list[str]:
    return [event_id for event_id, _ in events if event_id is not None]


def upto(events: Events, event_id: str) -> Events:
    """What a caller had had when this event came."""
    return events[: [found for found, _ in events].index(event_id) + 1]


def chat(model: str, n: int = 1, **directions: Any) -> dict[str, Any]:
    return {"model": model, "n": n, "messages": [{"role": "user", "content": script(**directions)}]}


@pytest.fixture(scope="module")
def first(stack: RunningStack) -> Door:
    return Door(stack, stack.base_url)


@pytest.fixture(scope="module")
def second(stack: RunningStack) -> Iterator[Door]:
    """A second front door, with a partition of its own."""
    port = ports.free_port()
    stack.add(SECOND, "bridge", "--port", str(port), HEADRACE_BRIDGE_INSTANCE="second-front-door")
    stack.await_ready(SECOND)
    yield Door(stack, f"http://127.0.0.1:{port}")
    stack.remove(SECOND)


def assert_whole(told: Told, text: str, n: int = 1) -> None:
    """Each choice has its text, an end, and the usage came once."""
    assert told.texts == dict.fromkeys(range(n), text)
    assert told.ends == dict.fromkeys(range(n), "stop")
    assert len(told.usages) == 1


def test_after_every_event_on_every_front_door(first: Door, second: Door) -> None:
    text = "na né 😀 "
    request_id, events = first.ask(
        **chat(MODEL, n=2, tokens=["na ", "né ", "😀 "], repeat=3, token_ms=30), logprobs=True
    )
    whole = Told().hear(events)
    assert_whole(whole, text * 3, n=2)
    for door in (first, second):
        for place in ids(events):
            _, rest = door.resume(request_id, place)
            assert Told().hear(upto(events, place)).hear(rest) == whole
            assert rest[-1] == (None, "[DONE]")
    assert second.resume(request_id, ids(events)[0], tenant="other")[0] == 404
    assert second.resume(request_id, tenant="other")[0] == 404


def test_a_killed_front_door(stack: RunningStack, first: Door, second: Door) -> None:
    """The caller of a broken connection goes on elsewhere, then at the front door that has come back."""
    directions = chat(MODEL, n=2, tokens=["x", "é", "😀"], repeat=40, token_ms=60)
    undisturbed = Told().hear(second.ask(**directions, logprobs=True, top_logprobs=1)[1])
    before = stack.pid("bridge")
    with httpx.Client(
        base_url=first.url, headers={"authorization": f"Bearer {stack.keys['acme']}"}, timeout=60, trust_env=False
    ) as http:
        body = {
            **directions,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 1,
        }
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            request_id = answer.headers["x-request-id"]
            events: Events = []
            for event in heard(answer):
                events.append(event)
                if len(ids(events)) == 10:
                    stack.kill("bridge")
    assert events[-1] != (None, "[DONE]")
    _, more = second.resume(request_id, ids(events)[-1], until=1)
    stack.until_restarted("bridge", before)
    _, rest = first.resume(request_id, ids(more)[-1])
    told = Told().hear(events).hear(more).hear(rest)
    assert (told.texts, told.logprobs, told.ends) == (undisturbed.texts, undisturbed.logprobs, undisturbed.ends)
    assert told.usages == undisturbed.usages
    assert told.roles == 2
    _, again = second.resume(request_id, include_usage=True)
    assert Told().hear(again) == told


def test_a_front_door_that_stops_in_good_order(stack: RunningStack, first: Door, second: Door) -> None:
    """It leaves what takes longer than its drain to others; nothing is cancelled."""
    request_id, events = second.ask(until=3, **chat(MODEL, tokens=["y "], repeat=100, token_ms=100))
    port = ports.free_port()
    stack.add("bridge-third", "bridge", "--port", str(port), HEADRACE_BRIDGE_DRAIN_MS="500")
    stack.await_ready("bridge-third")
    third = Door(stack, f"http://127.0.0.1:{port}")
    _, more = third.resume(request_id, ids(events)[-1], until=1)
    stack.remove("bridge-third")
    _, rest = first.resume(request_id, ids(more)[-1])
    assert_whole(Told().hear(events).hear(more).hear(rest), "y " * 100)


def test_a_killed_worker_between_leaving_and_coming_back(
    stack: RunningStack, first: Door, second: Door, busy: str
) -> None:
    """The ids are of the attempt before the takeover."""
    with worker(stack, "busy-b", busy):
        asked = [first.ask(until=3, **chat(busy, n=2, tokens=["z", "ü"], repeat=60, token_ms=100)) for _ in range(4)]
        before = stack.pid("busy-a")
        stack.kill("busy-a")
        for i, (request_id, events) in enumerate(asked):
            place = ids(events)[-1]
            _, more = (second if i % 2 else first).resume(request_id, place, until=1)
            _, rest = second.resume(request_id, ids(more)[-1])
            assert_whole(Told().hear(events).hear(more).hear(rest), "zü" * 60, n=2)
            _, again = first.resume(request_id, place)
            assert_whole(Told().hear(events).hear(again), "zü" * 60, n=2)
        attempts = [len(stack.events(request_id, "GenerationTakenOver")) for request_id, _ in asked]
        assert any(attempts)
        stack.until_restarted("busy-a", before)
        time.sleep(SESSION_MS / 1000)


def test_an_answer_that_has_ended_and_one_that_was_refused(first: Door, second: Door) -> None:
    request_id, events = first.ask(**chat(MODEL, tokens=["done"]))
    status, again = second.resume(request_id, include_usage=True)
    assert (status, Told().hear(again)) == (200, Told().hear(events))
    last = ids(events)[-1]
    assert [data for _, data in second.resume(request_id, last)[1]][-1] == "[DONE]"
    with pytest.raises(AssertionError, match="context_length_exceeded"):
        first.ask(**chat(MODEL, tokens=["x" * 9000]))


def test_an_answer_that_went_to_its_tenants_own_topic(
    stack: RunningStack, first: Door, second: Door, tmp_path: Path
) -> None:
    """Asked through the log alone, read at a front door."""
    grant = tmp_path / "grant.json"
    grant.write_text(stack.command("tenants", "grant", "other", "--json").stdout)
    asked = script(tokens=["di", "réct"], token_ms=50)
    done = stack.run([sys.executable, str(ROOT / "docs/direct.py"), str(grant), MODEL, asked])
    request_id = done.stdout.split(", ")[1].split("]")[0]
    status, events = second.resume(request_id, tenant="other", include_usage=True)
    assert status == 200
    assert_whole(Told().hear(events), "diréct")
    for place in ids(events):
        _, rest = first.resume(request_id, place, tenant="other")
        assert Told().hear(upto(events, place)).hear(rest) == Told().hear(events)
    assert first.resume(request_id, tenant="acme")[0] == 404
