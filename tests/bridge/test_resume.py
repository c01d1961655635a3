"""A stream goes on after any of its events, on any front door: exactly what follows, once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from bridge.resume import READERS_MAX
from bridge.streams import reply_partition
from infra import ports
from infra.kafka import make_admin, make_consumer
from infra.log import EventProducer
from schemas.events import ChoiceAnswer, InferenceAnswered, TokenLogprob, Usage
from schemas.topics import ANSWERS, TOKENS
from tests.bridge.conftest import MODEL, OTHER, TENANT, RunningBridge, start_bridge, stop_bridge
from tests.bridge.responder import VERSION
from tests.bridge.test_cancel import newest
from tests.bridge.test_openai_chat import body, read_events, script, stream_events
from tests.bridge.test_websocket import calling
from tests.bridge.told import Events, Told, some_events

DONE = (None, "[DONE]")


@pytest.fixture(scope="session")
def other(bridge: RunningBridge) -> Iterator[RunningBridge]:
    """Another front door on the same log, with a partition of its own."""
    settings = dataclasses.replace(
        bridge.settings, port=ports.free_port(), ops_port=0, instance="bridge-tests-other", keepalive_ms=200
    )
    running, thread = start_bridge(settings, bridge.responder)
    yield running
    stop_bridge(running, thread)


async def resume(
    bridge: RunningBridge,
    stream: str,
    last: str | None = None,
    key: str | None = None,
    until: int | None = None,
    **params: Any,
) -> tuple[httpx.Response, Events]:
    headers = {} if last is None else {"Last-Event-ID": last}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    async with (
        bridge.client() as client,
        client.stream("GET", f"/v1/streams/{stream}", headers=headers, params=params) as response,
    ):
        if response.status_code != 200:
            await response.aread()
            return response, []
        return response, await (read_events(response) if until is None else some_events(response, until))


def ids(events: Events) -> list[str]:
    return [event_id for event_id, _ in events if event_id is not None]


def kept(events: Events) -> Events:
    return [event for event in events if not event[1].startswith(":")]


async def ask(bridge: RunningBridge, path: str, payload: dict[str, Any]) -> tuple[str, Events]:
    async with bridge.client() as client, client.stream("POST", path, json=payload) as response:
        return response.headers["x-request-id"], kept(await read_events(response))


USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
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


async def broken_off(bridge: RunningBridge, mark: str, count: int, **directions: Any) -> tuple[str, Events]:
    """A stream whose caller leaves after so many events with an id, and wants to come back."""
    payload = body(messages=script(mark=mark, **directions), **USAGE)
    headers = {"X-Headrace-On-Disconnect": "continue"}
    async with (
        bridge.client() as client,
        client.stream("POST", "/v1/chat/completions", json=payload, headers=headers) as response,
    ):
        return response.headers["x-request-id"], await some_events(response, count)


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


# --- who may ----------------------------------------------------------------------------------------------------------


async def test_nobody_gets_a_stream_by_a_foreign_or_forged_or_broken_id(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    response, events = await stream_events(bridge, body())
    _, strangers = await stream_events(bridge, body())
    request_id = response.headers["x-request-id"]
    good = ids(events)[0]
    strange = ids(strangers)[0]
    assert (await resume(other, request_id, good))[0].status_code == 200
    parts = good.split(":")
    forged = [
        ":".join([*parts[:2], str(int(parts[2]) + 1), *parts[3:]]),
        ":".join([parts[0], str(int(parts[1]) ^ 1), *parts[2:]]),
        ":".join([strange.split(":")[0], *parts[1:]]),
        good[:-1] + ("A" if good[-1] != "A" else "B"),
        ":".join([*parts[:3], "AAAA", parts[4]]),
    ]
    for event_id in forged:
        refused, _ = await resume(other, request_id, event_id)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    for event_id in ("x", "a:b:c:d:e", ":", f"{request_id}:1", "é:::: ".strip(), "x" * 9000):
        refused, _ = await resume(other, request_id, None, last_event_id=event_id)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    mixed, _ = await resume(other, request_id, strange)
    assert (mixed.status_code, mixed.json()["error"]["param"]) == (400, "last_event_id")
    foreign, _ = await resume(other, request_id, good, key=OTHER)
    unknown, _ = await resume(other, request_id, forged[0], key=OTHER)
    assert foreign.status_code == 404
    assert foreign.json() == unknown.json()


async def test_nobody_gets_a_foreign_or_unknown_stream_from_its_beginning(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    response, _ = await stream_events(bridge, body())
    request_id = response.headers["x-request-id"]
    foreign, _ = await resume(other, request_id, key=OTHER)
    unknown, _ = await resume(other, "01890a5d-ac96-774b-bcce-b302099a8057")
    nonsense, _ = await resume(other, "zork")
    for refused in (foreign, unknown, nonsense):
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert refused.json() == unknown.json()
    assert (await resume(other, request_id, key="hr-nobody"))[0].status_code == 401


async def test_what_is_not_understood_is_refused_by_name(bridge: RunningBridge) -> None:
    response, _ = await stream_events(bridge, body())
    request_id = response.headers["x-request-id"]
    for name, value in (("format", "xml"), ("include_usage", "perhaps"), ("zork", "1")):
        refused, _ = await resume(bridge, request_id, None, None, None, **{name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    header = "X-Headrace-On-Disconnect"
    async with bridge.client() as client:
        for call in (
            client.post("/v1/chat/completions", json=body(), headers={header: "perhaps"}),
            client.get(f"/v1/streams/{request_id}", headers={header: "perhaps"}),
        ):
            refused = await call
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, header)


# --- leaving ----------------------------------------------------------------------------------------------------------


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


# --- what tokens no longer holds ---------------------------------------------------------------------------------------


async def trim(bridge: RunningBridge) -> None:
    """As retention does: everything now in the bridge's partition goes."""
    partition = TopicPartition(TOKENS, await reply_partition(bridge.settings.kafka, bridge.settings.instance))
    consumer, admin = make_consumer(bridge.settings.kafka), make_admin(bridge.settings.kafka)
    await consumer.start()
    await admin.start()
    end = (await consumer.end_offsets([partition]))[partition]
    await admin.delete_records({partition: RecordsToDelete(before_offset=end)})
    await consumer.stop()
    await admin.close()


async def answer(bridge: RunningBridge, answered: InferenceAnswered) -> None:
    producer = EventProducer(bridge.settings.kafka, "resume-tests")
    await producer.start()
    await producer.send_and_wait(ANSWERS, answered, key=answered.request_id)
    await producer.stop()


async def test_after_the_retention_of_tokens_the_rest_comes_from_the_answer(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    texts, tail = ["Dé", "n", "👋🏽", " x"], "!"
    payload = body(messages=script(tokens=texts, tail=tail, gap_ms=10), n=2, logprobs=True, **USAGE)
    request_id, events = await ask(other, "/v1/chat/completions", payload)
    whole = Told().hear(events)
    logprobs = tuple(TokenLogprob(0, text.encode(), -0.5) for text in texts)
    choices = tuple(ChoiceAnswer(i, tuple(range(4)), "".join(texts) + tail, "stop", None, logprobs) for i in range(2))
    where = (request_id, TENANT, MODEL, VERSION, "interactive")
    await trim(other)
    place = ids(events)[0]
    gone, _ = await resume(bridge, request_id, place)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    await answer(bridge, InferenceAnswered(*where, choices, Usage(7, 8, 3)))
    for door in (bridge, other):
        for i, (event_id, _) in enumerate(events):
            if event_id is not None:
                _, rest = await resume(door, request_id, event_id)
                assert Told().hear(events[: i + 1]).hear(rest) == whole
        _, again = await resume(door, request_id, include_usage=True)
        assert Told().hear(again) == whole
        last = ids(again)[-1]
        _, nothing = await resume(door, request_id, last)
        assert Told().hear(nothing).texts == {}
        assert (len(Told().hear(nothing).usages), nothing[-1]) == (1, DONE)


async def test_a_failed_answer_is_kept_as_failed(bridge: RunningBridge, other: RunningBridge) -> None:
    messages = script(tokens=["a", "b", "c"], fail="engine_error", fail_after=2, gap_ms=60)
    response, events = await stream_events(other, body(messages=messages))
    request_id = response.headers["x-request-id"]
    await trim(other)
    choices = (ChoiceAnswer(0, (0, 1), "ab", "error"),)
    where = (request_id, TENANT, MODEL, VERSION, "interactive")
    await answer(bridge, InferenceAnswered(*where, choices, Usage(7, 2), "engine_error", "broke"))
    place = ids(events)[0]
    _, rest = await resume(bridge, request_id, place)
    assert Told().hear([*events[:2], *rest[:-1]]).texts == {0: "ab"}
    assert json.loads(rest[-1][1])["error"] == {**json.loads(rest[-1][1])["error"], "code": "engine_error"}
    last = rest[0][0]
    failed, _ = await resume(bridge, request_id, last)
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "broke")


# --- sockets ----------------------------------------------------------------------------------------------------------


async def test_a_socket_resumes_too(bridge: RunningBridge, other: RunningBridge) -> None:
    async with calling(bridge) as caller:
        payload = {"messages": script(tokens=["a", "b", "c", "d"], gap_ms=40), "n": 2}
        message = {"id": "a", "endpoint": "chat.completions", "on_disconnect": "continue"}
        await caller.say(type="request", body={"model": MODEL, **payload, **USAGE}, **message)
        heard = [await caller.hear() for _ in range(6)]
    request_id = heard[0]["request_id"]
    last = [message["event_id"] for message in heard if "event_id" in message][-1]
    async with calling(other) as caller:
        await caller.say(type="resume", id="b", request_id=request_id, last_event_id=last)
        rest = (await caller.until_ended("b"))["b"]
        await caller.say(type="resume", id="c", request_id=request_id, include_usage=True)
        again = (await caller.until_ended("c"))["c"]
    assert rest[0] == {"type": "started", "id": "b", "request_id": request_id}

    def told(*parts: list[dict[str, Any]]) -> Told:
        chunks = [message for part in parts for message in part if message["type"] == "chunk"]
        return Told().hear([(None, json.dumps(chunk["data"])) for chunk in chunks])

    assert told(heard, rest) == told(again)
    assert told(again).texts == {0: "abcd", 1: "abcd"}
    assert request_id not in bridge.responder.cancelled


async def test_a_socket_refuses_what_http_refuses(bridge: RunningBridge) -> None:
    async with calling(bridge) as caller:
        await caller.say(type="resume", id="a", request_id="01890a5d-ac96-774b-bcce-b302099a8057")
        assert (await caller.hear())["error"]["code"] == "not_found"
        for field_name, value in (
            ("request_id", 1),
            ("last_event_id", 1),
            ("last_event_id", "x"),
            ("format", []),
            ("include_usage", {}),
            ("on_disconnect", []),
        ):
            good = {"request_id": "01890a5d-ac96-774b-bcce-b302099a8057"}
            await caller.say(type="resume", id="a", **{**good, field_name: value})
            assert (await caller.hear())["error"]["param"] == field_name


async def test_an_answer_to_several_prompts_has_no_ids(bridge: RunningBridge) -> None:
    _, events = await ask(bridge, "/v1/completions", {"model": MODEL, "stream": True, "prompt": ["ab", "cd"]})
    assert Told().hear(events).texts == {0: "ab", 1: "cd"}
    assert {event_id for event_id, _ in events} == {None}
