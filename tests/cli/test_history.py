"""What `explain` reads back from the real log."""

from __future__ import annotations

import secrets
import time

import pytest

from cli.history import AFTER_ENDING_MS, AFTER_REFUSAL_MS, CLOCK_MARGIN_MS, history, over_ms, request_id_of
from cli.records import Read
from infra.kafka import make_producer
from infra.log import EventProducer
from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.codec import encode_json
from schemas.errors import HeadraceError
from schemas.events import Event, InferenceCancelled, InferenceRejected, InferenceRequested
from schemas.ids import request_id
from schemas.topics import BATCH, CONTROL, LIFECYCLE, TopicSpec
from tests.decisions.ledgers import Asked, admitted, ending, rejected


def new_id(ahead_ms: int = 0) -> str:
    return request_id(time.time_ns() // 1_000_000 + ahead_ms, secrets.token_bytes(10))


async def write(kafka: KafkaSettings, *events: tuple[str, Event]) -> None:
    await ensure(kafka, [TopicSpec(REQUESTS, 2, "tenant")])
    producer = EventProducer(kafka, "test")
    await producer.start()
    try:
        for topic, event in events:
            await producer.send_and_wait(topic, event, key="cli-history")
    finally:
        await producer.stop()


REQUESTS = "requests.history"  # a tier of its own: nobody's admission reads it


def story(name: str) -> tuple[tuple[str, Event], ...]:
    refused = InferenceRejected(name, "t", "m", BATCH, "model_not_found", "no such model")
    return (REQUESTS, InferenceRequested(name, "m", prompt="x")), (LIFECYCLE, refused)


@pytest.mark.parametrize(
    "text",
    [
        "0193b5c0-0000-7000-8000-000000000000",
        " 0193B5C0-0000-7000-8000-000000000000\n",
        "chatcmpl-0193b5c0-0000-7000-8000-000000000000",
        "cmpl-0193b5c0-0000-7000-8000-000000000000",
    ],
)
def test_an_id_is_taken_as_callers_have_it(text: str) -> None:
    assert request_id_of(text) == "0193b5c0-0000-7000-8000-000000000000"


@pytest.mark.parametrize(
    "text", ["", "x", "chatcmpl-", "0193b5c0-0000-4000-8000-000000000000", "x" * 10_000, "chatcmpl-\ud800"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(HeadraceError, match="no request id"):
        request_id_of(text)


def test_a_request_is_over_with_its_ending_and_with_a_refusal_unless_it_was_let_in() -> None:
    asked = Asked(0, "r", 8, "k1")

    def told(*events: Event) -> int | None:
        return over_ms([Read(LIFECYCLE, 0, n, 1_000 * n, None, {}, b"", event) for n, event in enumerate(events)])

    assert told() is told(admitted(asked)) is None
    assert told(rejected(asked)) == AFTER_REFUSAL_MS
    assert told(rejected(asked), admitted(asked)) is told(admitted(asked), rejected(asked)) is None
    assert told(admitted(asked), ending("r", 5), rejected(asked)) == 1_000 + AFTER_ENDING_MS


@pytest.mark.kafka
async def test_only_the_requests_own_records_in_order(kafka: KafkaSettings) -> None:
    mine, other = new_id(), new_id()
    await write(kafka, *story(other), *story(mine), *story(other), (CONTROL, InferenceCancelled(mine)))
    found = await history(kafka, mine)
    assert [item.name for item in found] == ["InferenceRequested", "InferenceRejected", "InferenceCancelled"]


@pytest.mark.kafka
async def test_json_and_junk_that_names_it_are_shown(kafka: KafkaSettings) -> None:
    mine = new_id()
    await ensure(kafka, [TopicSpec(REQUESTS, 2, "tenant")])
    producer = make_producer(kafka)
    await producer.start()
    try:
        await producer.send_and_wait(REQUESTS, encode_json(InferenceRequested(mine, "m", prompt="x")), key=b"t")
        await producer.send_and_wait(REQUESTS, f'{{"type":"Nonsense","request_id":"{mine}"}}'.encode(), key=b"t")
        await producer.send_and_wait(REQUESTS, None, key=mine.encode())
        await producer.send_and_wait(REQUESTS, b"\xff\x00")
    finally:
        await producer.stop()
    found = await history(kafka, mine)
    assert sorted(item.name for item in found) == ["InferenceRequested", "undecodable", "undecodable"]


@pytest.mark.kafka
async def test_a_clock_that_is_ahead_hides_nothing_within_the_margin(kafka: KafkaSettings) -> None:
    near, far = new_id(CLOCK_MARGIN_MS // 2), new_id(CLOCK_MARGIN_MS * 3)
    await write(kafka, *story(near), *story(far))
    assert len(await history(kafka, near)) == 2
    assert await history(kafka, far) == []
    assert len(await history(kafka, far, everything=True)) == 2


@pytest.mark.kafka
async def test_nothing_is_found_of_an_unknown_id(kafka: KafkaSettings) -> None:
    assert await history(kafka, new_id()) == []
