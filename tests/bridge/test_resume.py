"""A stream goes on after any of its events, on any front door: exactly what follows, once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from bridge.resume import READERS_MAX
from tests.bridge.conftest import MODEL, OTHER, RunningBridge
from tests.bridge.resuming import DONE, USAGE, ask, broken_off, ids, resume
from tests.bridge.test_cancel import RawCaller, newest
from tests.bridge.test_openai_chat import body, script, stream_events
from tests.bridge.told import Told, some_events

SCRIPT = {
    "tokens": ["Dé", "n", "", "👋🏽", " x"],
    "tail": " the tail",
    "gap_ms": 30,
    "takeover_after": 2,
    "zombie": True,
}
CALLS = [
    ("/v1/chat/completions", {"messages": script(**SCRIPT), "n": 2, "logprobs": True, "top_logprobs": 1, **USAGE}),
    ("/v1/chat/completions", {"messages": script(**SCRIPT)}),
    ("/v1/completions", {"prompt": json.dumps(SCRIPT), "n": 2, "logprobs": 1, **USAGE}),
]


@pytest.mark.parametrize(("path", "payload"), CALLS)
async def test_what_follows_each_event_comes_exactly_once_on_any_front_door(
    bridge: RunningBridge, other: RunningBridge, path: str, payload: dict[str, Any]
) -> None:
    request_id, events = await ask(bridge, path, {"model": MODEL, "stream": True, **payload})
    whole = Told().hear(events)
    assert len(whole.usages) == (1 if "stream_options" in payload else 0)
    places = [i for i, (event_id, _) in enumerate(events) if event_id is not None]
    assert len(places) > 2
    for door in (bridge, other):
        for place in places:
            response, rest = await resume(door, request_id, events[place][0])
            assert response.headers["x-request-id"] == request_id
            assert rest[-1] == DONE
            assert all(event_id is None or event_id.startswith(request_id) for event_id, _ in rest)
            assert Told().hear(events[: place + 1]).hear(rest) == whole
    assert request_id not in other.responder.cancelled


@pytest.mark.parametrize(("path", "payload"), CALLS)
async def test_a_replay_is_the_whole_stream(
    bridge: RunningBridge, other: RunningBridge, path: str, payload: dict[str, Any]
) -> None:
    request_id, events = await ask(bridge, path, {"model": MODEL, "stream": True, **payload})
    whole = Told().hear(events)
    stream = json.loads(events[0][1])["id"]
    for door in (bridge, other):
        _, again = await resume(door, stream, include_usage="stream_options" in payload)
        assert Told().hear(again) == whole
        assert again[-1] == DONE
        _, rest = await resume(door, request_id, ids(again)[0])
        place = [event_id for event_id, _ in again].index(ids(again)[0])
        assert Told().hear(again[: place + 1]).hear(rest) == whole


async def test_a_caller_comes_back_twice_while_the_answer_grows(bridge: RunningBridge, other: RunningBridge) -> None:
    text = [f"{i} " for i in range(40)]
    request_id, events = await broken_off(bridge, "twice", 3, tokens=text, gap_ms=40, takeover_after=20)
    for _ in range(2):
        _, more = await resume(other, request_id, ids(events)[-1], until=5)
        events += more
    _, rest = await resume(bridge, request_id, ids(events)[-1])
    told = Told().hear(events).hear(rest)
    assert told.texts == {0: "".join(text)}
    assert (told.ends, len(told.usages), rest[-1]) == ({0: "stop"}, 1, DONE)
    assert request_id not in bridge.responder.cancelled


async def test_a_keep_alive_has_no_id_and_what_follows_it_is_what_follows_the_event_before(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    request_id, events = await broken_off(bridge, "quiet", 1, tokens=["a", "b", "c"], gap_ms=900)
    _, rest = await resume(other, request_id, events[-1][0])
    assert ": keep-alive" in [data for _, data in rest]
    assert Told().hear(events).hear(rest).texts == {0: "abc"}


async def test_several_follow_one_stream_at_once(bridge: RunningBridge, other: RunningBridge) -> None:
    text = [f"{i} " for i in range(20)]
    request_id, events = await broken_off(bridge, "several", 2, tokens=text, gap_ms=50)
    last = events[-1][0]
    answers = await asyncio.gather(*[resume(door, request_id, last) for door in (bridge, other) * 10])
    for _, rest in answers:
        assert Told().hear(events).hear(rest).texts == {0: "".join(text)}


async def test_what_is_much_is_read_no_faster_than_its_caller_reads(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    """Several megabytes, of which a front door here holds 64 KiB for one caller."""
    request_id, events = await broken_off(bridge, "much", 1, tokens=["x" * 8000], repeat=300)
    await bridge.until(lambda: bridge.responder.tokens_sent.get(request_id) == 300)
    for _ in range(2):
        _, rest = await resume(other, request_id, ids(events)[-1])
        assert rest[-1] == DONE
        assert len(Told().hear(events).hear(rest).texts[0]) == 300 * 8000


async def test_what_was_read_for_a_caller_is_freed_when_it_leaves(bridge: RunningBridge, other: RunningBridge) -> None:
    request_id, events = await broken_off(bridge, "freed", 1, tokens=["x"], repeat=2000, gap_ms=20)
    path, headers = f"/v1/streams/{request_id}", {"Last-Event-ID": ids(events)[-1]}

    async def come_and_go(pause_s: float) -> None:
        async with (
            asyncio.timeout(pause_s),
            other.client() as client,
            client.stream("GET", path, headers=headers) as found,
        ):
            await found.aread()

    for pause_s in (0.01, 0.05, 0.1, 0.2, 0.5):
        results = await asyncio.gather(*[come_and_go(pause_s) for _ in range(READERS_MAX)], return_exceptions=True)
        assert {type(result) for result in results} <= {TimeoutError, httpx.ReadError}
    _, again = await resume(other, request_id, until=1)
    assert len(again) > 1


async def test_a_failure_comes_after_all_that_was_made(bridge: RunningBridge, other: RunningBridge) -> None:
    messages = script(tokens=["a", "b", "c", "d"], fail="engine_error", fail_after=3, gap_ms=20)
    response, events = await stream_events(bridge, body(messages=messages))
    request_id = response.headers["x-request-id"]
    assert events[-1][0] is None
    for place in (*ids(events)[:-1], None):
        _, rest = await resume(other, request_id, place)
        assert json.loads(rest[-1][1])["error"]["code"] == "engine_error"
        shown = events[: [event_id for event_id, _ in events].index(place) + 1] if place else []
        assert Told().hear([*shown, *rest[:-1]]).texts == {0: "abc"}
    failed, _ = await resume(other, request_id, ids(events)[-1])
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")


async def test_a_refused_request_is_refused_again(bridge: RunningBridge, other: RunningBridge) -> None:
    async with bridge.client() as client:
        refused = await client.post("/v1/chat/completions", json=body(messages=script(reject="rate_limited")))
    again, _ = await resume(other, refused.headers["x-request-id"])
    assert (again.status_code, again.json()) == (429, refused.json())


async def test_a_queued_request_is_waited_for(bridge: RunningBridge, other: RunningBridge) -> None:
    task = asyncio.create_task(stream_events(bridge, body(messages=script(mark="later", tokens=["x"], first_ms=1500))))
    await bridge.until(lambda: newest(bridge, "later") is not None)
    _, events = await resume(other, str(newest(bridge, "later")))
    assert Told().hear(events).texts == {0: "x"}
    await task


async def test_a_resumed_stream_is_cancelled_only_when_its_caller_says_so(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    request_id, events = await broken_off(bridge, "left-again", 1, tokens=["x"], repeat=4000, gap_ms=20)
    for on_disconnect, cancelled in (("continue", False), (None, False), ("cancel", True)):
        headers = {"Last-Event-ID": events[-1][0] or ""}
        if on_disconnect is not None:
            headers["X-Headrace-On-Disconnect"] = on_disconnect
        async with (
            other.client() as client,
            client.stream("GET", f"/v1/streams/{request_id}", headers=headers) as response,
        ):
            assert len(await some_events(response, 1)) == 1
        if cancelled:
            await bridge.until(lambda: request_id in bridge.responder.cancelled)
            assert bridge.responder.cancelled[request_id].reply.partition == int((events[-1][0] or "").split(":")[1])
        else:
            await asyncio.sleep(0.3)
            assert request_id not in bridge.responder.cancelled


async def test_an_answer_to_several_prompts_has_no_ids_and_is_named_by_its_first(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    request_id, events = await ask(bridge, "/v1/completions", {"model": MODEL, "stream": True, "prompt": ["ab", "cd"]})
    assert Told().hear(events).texts == {0: "ab", 1: "cd"}
    assert {event_id for event_id, _ in events} == {None}
    for door in (bridge, other):
        _, again = await resume(door, request_id, format="completion")
        assert Told().hear(again).texts == {0: "ab"}


async def test_one_that_waits_for_its_turn_is_followed_from_before_it_begins(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    """Nothing is known of it in `lifecycle` then: its own record is found. To other tenants there is no such stream."""
    text = [f"{i} " for i in range(5)]
    payload = body(messages=script(mark="waits for its turn", turn_ms=8_000, tokens=text))
    async with RawCaller(bridge) as caller:
        await caller.post(payload)
        await bridge.until(lambda: newest(bridge, "waits for its turn") is not None)
        request_id = newest(bridge, "waits for its turn")
        assert request_id is not None
        (refused, _), *answers = await asyncio.gather(
            resume(other, request_id, key=OTHER), resume(other, request_id), resume(bridge, request_id)
        )
        for answer, events in answers:
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, request_id)
            assert (Told().hear(events).texts, events[-1]) == ({0: "".join(text)}, DONE)
            first = [event_id for event_id, _ in events].index(ids(events)[0])
            _, rest = await resume(other, request_id, ids(events)[0])
            assert Told().hear(events[: first + 1]).hear(rest) == Told().hear(events)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


async def test_one_that_waits_and_is_refused_then_says_so_to_who_came_back(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    payload = body(messages=script(mark="waits in vain", turn_ms=8_000, reject="overloaded"))
    async with RawCaller(bridge) as caller:
        await caller.post(payload)
        await bridge.until(lambda: newest(bridge, "waits in vain") is not None)
        request_id = newest(bridge, "waits in vain")
        assert request_id is not None
        answer, _ = await resume(other, request_id)
    assert answer.json()["error"]["code"] == "overloaded"
