"""A stream that `tokens` no longer holds goes on from its answer."""

from __future__ import annotations

import json

from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from bridge.streams import reply_partition
from infra.kafka import make_admin, make_consumer
from infra.log import EventProducer
from schemas.events import ChoiceAnswer, InferenceAnswered, TokenLogprob, Usage
from schemas.topics import ANSWERS, TOKENS
from tests.bridge.conftest import MODEL, TENANT, RunningBridge
from tests.bridge.responder import VERSION
from tests.bridge.resuming import DONE, USAGE, ask, ids, resume
from tests.bridge.test_openai_chat import body, script, stream_events
from tests.bridge.told import Told


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
    producer = EventProducer(bridge.settings.kafka, "resume-tests", bridge.responder.payloads)
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


async def test_an_answer_too_large_for_a_record_is_replayed_and_one_that_is_lost_says_so(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    text = "Größe " * 200_000
    response, events = await stream_events(other, body(messages=script(tokens=["a", "b"], gap_ms=10)))
    request_id = response.headers["x-request-id"]
    await trim(other)
    where = (request_id, TENANT, MODEL, VERSION, "interactive")
    await answer(bridge, InferenceAnswered(*where, (ChoiceAnswer(0, (0, 1), text, "stop"),), Usage(7, 2)))
    for door in (bridge, other):
        _, rest = await resume(door, request_id)
        assert Told().hear(rest).texts == {0: text}
    payloads = bridge.responder.payloads
    assert payloads is not None
    async for found in payloads.store.listed(f"payloads/{TENANT}"):
        await payloads.store.delete(found.key)
    lost, _ = await resume(bridge, request_id)
    assert (lost.status_code, lost.json()["error"]["code"]) == (500, "payload_lost")
    assert events


async def test_a_chunk_too_large_for_a_record_is_shown_and_one_slow_call_is_not_cut_for_it(
    bridge: RunningBridge,
) -> None:
    text = "y" * 1_500_000
    for stream in (True, False):
        payload = body(messages=script(tokens=["a", text, "b"]), stream=stream)
        if stream:
            _, events = await stream_events(bridge, payload)
            assert Told().hear(events).texts == {0: f"a{text}b"}
        else:
            async with bridge.client() as client:
                response = await client.post("/v1/chat/completions", json=payload)
            assert response.json()["choices"][0]["message"]["content"] == f"a{text}b"
