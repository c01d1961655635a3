"""A call that is sent again under its key gets the first one's answer, from its start, on any front door."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

import httpx
import pytest

from bridge.calls import Call
from bridge.idempotency import with_key
from bridge.openai_completions import CompletionCall
from decisions.idempotency import keyed
from schemas.errors import HeadraceError
from schemas.events import InferenceAnswered, InferenceRequested, Reply, Usage
from schemas.parts import ChoiceAnswer
from schemas.reasons import Reason
from schemas.topics import TOKENS
from tests.bridge.conftest import MODEL, OTHER, TENANT, RunningBridge
from tests.bridge.responder import VERSION
from tests.bridge.resuming import DONE, USAGE, ids, kept, resume
from tests.bridge.test_cancel import RawCaller, newest
from tests.bridge.test_openai_chat import body, read_events, script
from tests.bridge.test_resume_retention import answer, trim
from tests.bridge.test_websocket import calling, text_of
from tests.bridge.told import Events, Told, some_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_numbers = count()


def new_key() -> str:
    return f"bridge tests {next(_numbers)}"


async def ask(
    bridge: RunningBridge,
    key: str,
    payload: dict[str, Any],
    path: str = CHAT,
    until: int | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[httpx.Response, Events]:
    given = {"Idempotency-Key": key, **(headers or {})}
    async with bridge.client() as client, client.stream("POST", path, json=payload, headers=given) as response:
        if "text/event-stream" not in response.headers["content-type"]:
            await response.aread()
            return response, []
        return response, kept(await read_events(response)) if until is None else await some_events(response, until)


def replayed(response: httpx.Response) -> bool:
    return bool(response.headers.get("Idempotent-Replayed") == "true")


LONG = {"tokens": ["Dé", "n", "", "👋🏽", " x"], "tail": " the tail", "gap_ms": 60, "takeover_after": 2, "zombie": True}
CALLS = [
    (CHAT, {"messages": script(**LONG), "n": 2, "logprobs": True, "top_logprobs": 1}),
    (COMPLETIONS, {"prompt": json.dumps(LONG), "n": 2, "logprobs": 1}),
]


@pytest.mark.parametrize(("path", "payload"), CALLS)
async def test_at_once_while_it_runs_and_after_its_end(
    bridge: RunningBridge, other: RunningBridge, path: str, payload: dict[str, Any]
) -> None:
    key, given = new_key(), {"model": MODEL, "stream": True, **payload, **USAGE}
    asked = [asyncio.create_task(ask(door, key, given, path)) for door in (bridge, other) * 2]
    await asyncio.sleep(0.15)
    asked += [asyncio.create_task(ask(door, key, given, path)) for door in (bridge, other)]
    answers = await asyncio.gather(*asked)
    answers += [await ask(door, key, given, path) for door in (bridge, other)]
    first = next(response for response, _ in answers if not replayed(response))
    assert [replayed(response) for response, _ in answers].count(False) == 1
    whole = Told().hear(answers[0][1])
    for response, events in answers:
        assert response.headers["x-request-id"] == first.headers["x-request-id"]
        assert Told().hear(events) == whole
        assert events[-1] == DONE
        assert all(event_id is None or event_id.startswith(first.headers["x-request-id"]) for event_id, _ in events)
    assert len(whole.usages) == 1 and len(whole.ends) == 2
    _, events = answers[-1]
    place = ids(events)[0]
    _, rest = await resume(bridge, first.headers["x-request-id"], place)
    had = events[: [event_id for event_id, _ in events].index(place) + 1]
    assert Told().hear(had).hear(rest) == whole


async def test_whole_then_streamed_then_whole(bridge: RunningBridge, other: RunningBridge) -> None:
    key, messages = new_key(), script(tokens=["a", "b"], gap_ms=100)
    first, _ = await ask(bridge, key, body(stream=False, messages=messages))
    streamed, events = await ask(other, key, body(messages=messages))
    again, _ = await ask(other, key, body(stream=False, messages=messages), headers={"X-Headrace-Timeout-Ms": "5000"})
    assert first.json() == again.json()
    assert first.json()["id"] == json.loads(events[0][1])["id"]
    assert Told().hear(events).texts == {0: "ab"}
    assert [replayed(response) for response in (first, streamed, again)] == [False, True, True]


async def test_a_call_of_several_prompts_joins_each_of_its_streams(bridge: RunningBridge, other: RunningBridge) -> None:
    key = new_key()
    payload = {"model": MODEL, "stream": False, "prompt": ["ab", "cd", "ab"]}
    first, _ = await ask(bridge, key, payload, COMPLETIONS)
    again, _ = await ask(other, key, payload, COMPLETIONS)
    assert first.json() == again.json()
    assert [choice["text"] for choice in again.json()["choices"]] == ["ab", "cd", "ab"]
    _, events = await ask(other, key, {**payload, "stream": True}, COMPLETIONS)
    assert Told().hear(events).texts == {0: "ab", 1: "cd", 2: "ab"}
    for prompt in (["ab"], ["ab", "cd"], ["ab", "cd", "ab", "ef"], ["cd", "ab", "ab"]):
        refused, _ = await ask(bridge, key, {**payload, "prompt": prompt}, COMPLETIONS)
        assert refused.status_code == 409


def test_the_prompts_of_a_call_have_keys_of_their_own_and_tell_the_whole_of_it() -> None:
    def known(*prompts: str) -> list[Any]:
        parsed = CompletionCall({"model": MODEL, "prompt": list(prompts)})
        return [keyed(request, Reply(TOKENS, 0)) for request in with_key(parsed.requests, "k" * 255)]

    assert known("a", "b") == known("a", "b")
    assert len({found.key for found in known("a", "a", "a")}) == 3
    assert known("a", "b")[0].key == known("a")[0].key
    for others in (("a",), ("a", "b", "c"), ("a", "c"), ("b", "a")):
        assert known("a", "b")[0].fingerprint != known(*others)[0].fingerprint


async def test_another_request_under_the_key_is_a_conflict_and_another_tenants_is_not(bridge: RunningBridge) -> None:
    key = new_key()
    await ask(bridge, key, body())
    for changed in ({"temperature": 0.5}, {"messages": script(tokens=["z"])}, {"user": "u"}, {"seed": 0}):
        refused, _ = await ask(bridge, key, body(**changed))
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("conflict", "idempotency_key")
        assert "unchanged" in error["message"]
    mine, _ = await ask(bridge, key, body(), headers={"Authorization": f"Bearer {OTHER}"})
    assert mine.status_code == 200 and not replayed(mine)


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "é"])
async def test_a_key_that_is_none(bridge: RunningBridge, key: str) -> None:
    async with bridge.client() as client:
        refused = await client.post(CHAT, json=body(), headers=[(b"Idempotency-Key", key.encode())])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"


async def test_a_caller_that_leaves_cancels_nothing_and_finds_all_of_it(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    key, given = new_key(), body(messages=script(mark="goes on alone", tokens=["x "], repeat=40, gap_ms=30))
    first, had = await ask(bridge, key, given, until=2)
    again, _ = await ask(other, key, given, until=2, headers={"X-Headrace-On-Disconnect": "cancel"})
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    _, events = await ask(other, key, given)
    assert Told().hear(events).texts == {0: "x " * 40}
    assert Told().hear(had).heads == Told().hear(events).heads
    assert not {first.headers["x-request-id"], newest(bridge, "goes on alone")} & set(bridge.responder.cancelled)


async def test_a_caller_that_says_so_cancels(bridge: RunningBridge) -> None:
    given = body(messages=script(mark="said so", tokens=["x "], repeat=400, gap_ms=30))
    first, _ = await ask(bridge, new_key(), given, until=2, headers={"X-Headrace-On-Disconnect": "cancel"})
    await bridge.until(lambda: first.headers["x-request-id"] in bridge.responder.cancelled)


async def test_the_deadline_of_a_repeat_ends_the_repeat_alone(bridge: RunningBridge, other: RunningBridge) -> None:
    key, given = new_key(), body(stream=False, messages=script(mark="slow", first_ms=4_500))
    first = asyncio.create_task(ask(bridge, key, given))
    await bridge.until(lambda: newest(bridge, "slow") is not None)
    late, _ = await ask(other, key, given, headers={"X-Headrace-Timeout-Ms": "100"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (await first)[0].json()["choices"][0]["message"]["content"] == "ok"
    assert newest(bridge, "slow") not in bridge.responder.cancelled


async def test_a_failure_is_told_as_the_first_heard_it(bridge: RunningBridge, other: RunningBridge) -> None:
    key, given = new_key(), body(messages=script(tokens=["a", "b", "c"], fail="engine_error", fail_after=2, gap_ms=20))
    for door in (bridge, other):
        response, events = await ask(door, key, given)
        assert response.status_code == 200
        assert Told().hear(events[:-1]).texts == {0: "ab"}
        assert json.loads(events[-1][1])["error"]["code"] == "engine_error"
    assert replayed(response)
    whole, _ = await ask(other, key, {**given, "stream": False})
    assert (whole.status_code, replayed(whole)) == (500, True)


async def test_what_tokens_no_longer_holds_comes_from_the_answers(bridge: RunningBridge, other: RunningBridge) -> None:
    """Of a call of two prompts, streamed and whole; and of one, which can be resumed."""
    key, lone = new_key(), new_key()
    payload = {"model": MODEL, "stream": False, "prompt": ["ab", "cd"]}
    first, _ = await ask(other, key, payload, COMPLETIONS)
    _, events = await ask(other, lone, body(messages=script(tokens=["a", "b"]), **USAGE))
    await trim(other)
    keys = {lone, *(request.idempotency_key for request in with_key([InferenceRequested("", MODEL)] * 2, key))}
    for name, seen in bridge.responder.seen.copy().items():
        if seen.event.idempotency_key in keys:
            text = seen.event.prompt or "ab"
            choices = (ChoiceAnswer(0, (0, 1), text, "stop"),)
            await answer(other, InferenceAnswered(name, TENANT, MODEL, VERSION, "interactive", choices, Usage(7, 2, 3)))
    for door in (bridge, other):
        again, _ = await ask(door, key, payload, COMPLETIONS)
        assert (again.json(), replayed(again)) == (first.json(), True)
        _, streamed = await ask(door, key, {**payload, "stream": True}, COMPLETIONS)
        assert Told().hear(streamed).texts == {0: "ab", 1: "cd"}
        response, found = await ask(door, lone, body(messages=script(tokens=["a", "b"]), **USAGE))
        assert replayed(response) and Told().hear(found) == Told().hear(events)
        _, rest = await resume(bridge, response.headers["x-request-id"], ids(found)[-1])
        assert rest[-1] == DONE


async def test_on_sockets(bridge: RunningBridge, other: RunningBridge) -> None:
    key, messages = new_key(), script(tokens=["só", "ck"], gap_ms=50)
    heard = []
    for door in (bridge, other):
        async with calling(door) as caller:
            asked = {"model": MODEL, "messages": messages}
            await caller.say(type="request", id="a", endpoint="chat.completions", body=asked, idempotency_key=key)
            heard.append((await caller.until_ended("a"))["a"])
            await caller.say(type="request", id="b", endpoint="chat.completions", body=asked, idempotency_key=7)
            assert (await caller.hear())["error"]["param"] == "idempotency_key"
    assert [text_of(messages) for messages in heard] == ["sóck"] * 2
    assert "replayed" not in heard[0][0] and heard[1][0]["replayed"] is True
    assert heard[0][0]["request_id"] == heard[1][0]["request_id"]
    response, events = await ask(bridge, key, body(messages=messages))
    assert replayed(response) and Told().hear(events).texts == {0: "sóck"}
    place = next(message["event_id"] for message in heard[1] if "event_id" in message)
    _, rest = await resume(bridge, heard[1][0]["request_id"], place)
    assert rest[-1] == DONE


async def test_the_repeats_own_id_leads_to_the_first(bridge: RunningBridge, other: RunningBridge) -> None:
    key, given = new_key(), body(messages=script(mark="its own", tokens=["a", "b"]))
    first, events = await ask(bridge, key, given)
    await ask(other, key, given)
    repeat = [name for name, seen in bridge.responder.seen.copy().items() if seen.event.idempotency_key == key][-1]
    assert repeat != first.headers["x-request-id"]
    response, again = await resume(other, repeat)
    assert response.headers["x-request-id"] == first.headers["x-request-id"]
    assert Told().hear(again) == Told().hear(events)


@pytest.mark.parametrize("directions", [{"turn_ms": 8_000}, {"only_there": True}], ids=["heard", "read"])
async def test_who_took_up_a_request_that_waited_for_its_turn_is_led_to_the_first_that_it_joins(
    bridge: RunningBridge, other: RunningBridge, directions: dict[str, Any]
) -> None:
    """Whether it is told while its partition is followed already, or found there by reading."""
    text, mark = [f"{i} " for i in range(20)], f"joins {next(_numbers)}"
    first, events = await ask(other, new_key(), body(messages=script(tokens=text, gap_ms=20), **USAGE))
    request_id = first.headers["x-request-id"]
    async with RawCaller(bridge) as asking, calling(other) as socket:
        await asking.post(body(messages=script(mark=mark, joins=request_id, **directions)))
        await bridge.until(lambda: newest(bridge, mark) is not None)
        repeat = newest(bridge, mark)
        assert repeat is not None and repeat != request_id
        await socket.say(type="resume", id="a", request_id=repeat)
        answers = await asyncio.gather(*[resume(door, repeat, include_usage="true") for door in (bridge, other)])
        assert text_of((await socket.until_ended("a"))["a"]) == "".join(text)
    for response, again in answers:
        assert (response.headers["x-request-id"], replayed(response)) == (request_id, True)
        assert Told().hear(again) == Told().hear(events)
        place = ids(again)[0]
        _, rest = await resume(other, request_id, place)
        had = again[: [event_id for event_id, _ in again].index(place) + 1]
        assert Told().hear(had).hear(rest) == Told().hear(events)
    assert {request_id, repeat}.isdisjoint(bridge.responder.cancelled.keys() - {repeat})


async def test_what_is_open_is_freed(bridge: RunningBridge, other: RunningBridge) -> None:
    key, given = new_key(), body(messages=script(tokens=["x"], repeat=2_000, gap_ms=20))
    first, _ = await ask(bridge, key, given, until=1)
    for pause_s in (0.0, 0.02, 0.1, 0.3):
        waits = [asyncio.wait_for(ask(other, key, given), pause_s + 0.01) for _ in range(8)]
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert {type(result) for result in results} == {TimeoutError}
    response, _ = await ask(other, key, given, until=2)
    assert response.headers["x-request-id"] == first.headers["x-request-id"]


def test_a_keyed_call_that_the_log_did_not_confirm_is_not_cancelled_for_its_caller_comes_again() -> None:
    from bridge.door import FrontDoor

    door = FrontDoor.__new__(FrontDoor)
    door.draining = False
    for error, outlives, cancels in (
        (Reason.UNAVAILABLE, False, False),
        (Reason.CANCELLED, True, False),
        (Reason.CANCELLED, False, True),
        (Reason.CONFLICT, True, True),
    ):
        call = Call(1, 0.0, outlives=outlives, keyed=True)
        call.add_leg("r", 0)
        call.error = HeadraceError(error, "")
        assert door._cancels_what_is_left(call) is cancels
