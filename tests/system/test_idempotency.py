"""A request that is sent twice under one key is computed once, charged once, and answered whole to all who sent it, whatever is killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import ports
from schemas.events import InferenceJoined, InferenceScheduled, Quota
from tests.bridge.told import Events, Told
from tests.system.audit import Audit, Mark
from tests.system.running import MODEL, ROOT, RunningStack, script
from tests.system.test_quotas import tenant
from tests.system.test_resume import ids, read

pytestmark = pytest.mark.timeout(240)
SECOND = "bridge-second"
ADMISSION = "admission-interactive"
TEXT = ["na ", "né ", "😀 "]


@pytest.fixture(scope="module")
def doors(stack: RunningStack) -> Iterator[list[str]]:
    """Two front doors, each with a partition of its own."""
    port = ports.free_port()
    stack.add(SECOND, "bridge", "--port", str(port), HEADRACE_BRIDGE_INSTANCE="second-front-door")
    stack.await_ready(SECOND)
    yield [stack.base_url, f"http://127.0.0.1:{port}"]
    stack.remove(SECOND)


class Heard:
    """One caller's answer."""

    def __init__(self, answer: httpx.Response, events: Events) -> None:
        self.status = answer.status_code
        self.request_id = answer.headers.get("x-request-id", "")
        self.replayed = answer.headers.get("idempotent-replayed") == "true"
        self.events = events
        self.whole = bool(events) and events[-1] == (None, "[DONE]")

    @property
    def told(self) -> Told:
        return Told().hear(self.events)


def chat(content: str, **options: Any) -> dict[str, Any]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **usage, **options}


def signed(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"}


def knows(url: str, api_key: str) -> bool:
    return httpx.get(f"{url}/v1/models", headers=signed(api_key), trust_env=False).is_success


def ask(api_key: str, url: str, key: str, body: dict[str, Any], until: int | None = None) -> Heard:
    headers = {**signed(api_key), "idempotency-key": key}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
            return Heard(answer, [])
        return Heard(answer, read(answer, until))


def computed(mark: Mark) -> set[str]:
    """The requests that became work since."""
    return {item.event.request_id for item in mark.records() if isinstance(item.event, InferenceScheduled)}


def test_asked_at_once_at_two_front_doors_and_after_the_end(stack: RunningStack, doors: list[str]) -> None:
    audit, work, lifecycle = Audit(stack), Mark(stack, "work."), Mark(stack, "lifecycle")
    api_key = tenant(stack, "once", Quota("interactive", requests_per_minute=1, tokens_per_day=2_000))
    stack.until(lambda: all(knows(url, api_key) for url in doors))
    body = chat(script(tokens=TEXT, repeat=4, token_ms=40), n=2, logprobs=True, max_tokens=60)
    with ThreadPoolExecutor(12) as pool:
        heard = list(pool.map(lambda number: ask(api_key, doors[number % 2], "at once", body), range(12)))
    heard += [ask(api_key, url, "at once", body) for url in doors]
    assert {each.status for each in heard} == {200}
    (first,) = {each.request_id for each in heard}
    assert computed(work) == {first}
    assert [each.replayed for each in heard].count(False) == 1
    for each in heard:
        assert each.whole
        assert each.told == heard[0].told
    assert heard[0].told.texts == dict.fromkeys(range(2), "".join(TEXT) * 4)
    assert ask(api_key, doors[0], "another", body).status == 429, "its one request a minute was used by the first"
    (other,) = {ask(stack.keys["other"], doors[0], "at once", body).request_id}
    assert other != first
    assert ask(api_key, doors[1], "at once", {**body, "seed": 1}).status == 409
    audit.settled(scripted=False)
    joined = [item.event for item in lifecycle.records() if isinstance(item.event, InferenceJoined)]
    assert {event.first_request_id for event in joined} == {first}
    assert len(joined) == len(heard) - 1
    repeat = joined[0].request_id
    shown = stack.command("explain", repeat).stdout
    assert f"joined {first}" in " ".join(shown.split())
    assert "asked before" in shown
    status = httpx.get(f"{doors[1]}/v1/streams/{repeat}", headers=signed(api_key), timeout=60, trust_env=False)
    assert status.headers["x-request-id"] == first


def test_its_caller_vanishes_and_then_its_front_door_is_killed(stack: RunningStack, doors: list[str]) -> None:
    """The repeat at the other one has all of it, token for token."""
    audit, work, before = Audit(stack), Mark(stack, "work."), stack.pid("bridge")
    body = chat(script(tokens=TEXT, repeat=25, token_ms=40))
    left = ask(stack.keys["acme"], doors[0], "vanished", body, until=3)
    again = ask(stack.keys["acme"], doors[0], "vanished", body, until=3)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(ask, stack.keys["acme"], doors[0], "vanished", body)
        stack.kill("bridge")
        error = cut.exception()
        assert isinstance(error, httpx.TransportError) or not cut.result().whole
    found = ask(stack.keys["acme"], doors[1], "vanished", body)
    assert found.whole and found.replayed and found.told.texts == {0: "".join(TEXT) * 25}
    assert {left.request_id, again.request_id, found.request_id} == computed(work)
    assert len(ids(left.events)) == 3
    stack.until_restarted("bridge", before)
    late = ask(stack.keys["acme"], doors[0], "vanished", body)
    assert late.told == found.told
    audit.settled()


def test_admission_is_killed_between_the_first_and_its_repeats(stack: RunningStack, doors: list[str]) -> None:
    audit, work = Audit(stack), Mark(stack, "work.")
    body = chat(script(tokens=TEXT, repeat=4, token_ms=20))
    keys = [f"killed {number}" for number in range(30)]
    with ThreadPoolExecutor(60) as pool:
        first = [pool.submit(ask, stack.keys["acme"], doors[0], key, body) for key in keys]
        before = stack.pid(ADMISSION)
        stack.kill(ADMISSION)
        again = [pool.submit(ask, stack.keys["acme"], doors[1], key, body) for key in keys]
        stack.until_restarted(ADMISSION, before)
        heard = list(zip([each.result() for each in first], [each.result() for each in again], strict=True))
    for one, two in heard:
        assert one.whole and two.whole
        assert one.request_id == two.request_id
        assert one.told == two.told
        assert one.told.texts == {0: "".join(TEXT) * 4}
        assert sorted([one.replayed, two.replayed]) == [False, True]
    assert computed(work) == {one.request_id for one, _ in heard}
    audit.settled()


def test_a_direct_producer(stack: RunningStack, doors: list[str], tmp_path: Path) -> None:
    """Its repeat is sent back to the first's start; a front door joins the same stream only on its own tier."""
    grant = tmp_path / "grant.json"
    grant.write_text(stack.command("tenants", "grant", "other", "--json").stdout)
    work = Mark(stack, "work.")
    asked = [sys.executable, str(ROOT / "docs/direct.py"), str(grant), MODEL, script(tokens=["di", "réct"])]
    outputs = {stack.run([*asked, "direct"]).stdout for _ in range(3)}
    assert len(outputs) == 1 and "diréct" in outputs.pop()
    assert len(computed(work)) == 1
    stack.run(asked)
    assert len(computed(work)) == 2
