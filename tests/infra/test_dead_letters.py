"""What can't be processed is kept raw, without its grant, with where it was and why it was refused."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest

from infra.dead_letters import CUT_VALUE_BYTES, dead_letter
from infra.log import EventProducer
from infra.read import read_to_end
from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.codec import Codec, encode, encode_json
from schemas.events import ApiKey, RecordDeadLettered, TenantChanged
from schemas.topics import DEAD_LETTERS, RECORD_MAX_BYTES, TENANTS, TopicSpec


async def found(kafka: KafkaSettings, topic: str) -> list[RecordDeadLettered]:
    codec = Codec()
    events = [
        codec.decode(record.value) async for record in read_to_end(kafka, DEAD_LETTERS) if record.key == topic.encode()
    ]
    return [event for event in events if isinstance(event, RecordDeadLettered)]


async def test_a_real_record_is_kept_without_its_grant(kafka: KafkaSettings, producer: EventProducer):
    topic = f"dead-{uuid.uuid4().hex[:8]}"
    await ensure(kafka, [TopicSpec(topic, 1, "id")])
    headers = [("grant", b"secret"), ("traceparent", b"00"), ("Grant", b"secret too"), ("Authorization", b"Bearer x")]
    await (await producer.send_raw(topic, b"\xff\x00", b"key", 0, headers))
    [record] = [record async for record in read_to_end(kafka, topic)]

    await dead_letter(producer, record, "undecodable", "neither Avro nor JSON", "admission")

    [event] = await found(kafka, topic)
    assert event == RecordDeadLettered(
        topic,
        0,
        0,
        record.timestamp,
        b"key",
        b"\xff\x00",
        {"traceparent": b"00"},
        "undecodable",
        "neither Avro nor JSON",
        "admission",
    )


@pytest.mark.parametrize("value", [None, b"", b"\xc3\x01", b"x" * RECORD_MAX_BYTES])
async def test_any_record_can_be_put_aside(kafka: KafkaSettings, producer: EventProducer, value: bytes | None):
    record = SimpleNamespace(
        topic=f"dead-{uuid.uuid4().hex[:8]}",
        partition=3,
        offset=7,
        timestamp=1,
        key=None,
        value=value,
        headers=(("a", None), ("\udcff", b"x" * 100_000)),
    )

    await dead_letter(producer, record, "undecodable", "an unpaired \ud800 surrogate", "admission")

    [event] = await found(kafka, record.topic)
    if value is None or len(value) < CUT_VALUE_BYTES:
        assert event.value == value
    else:
        assert event.value == value[:CUT_VALUE_BYTES]
        assert f"of {len(value)} bytes are kept" in event.message
    assert event.message.startswith("an unpaired ? surrogate")
    assert event.headers["a"] == b""


TENANT = TenantChanged("acme", "a salt", (ApiKey("k1", "5ec4e7" * 10, ("batch",), 0),), 0)


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        (TENANTS, b"junk that once was: a salt"),
        (TENANTS, encode(TENANT)[:-5]),
        ("wrong", encode(TENANT)),
        ("wrong", encode_json(TENANT)[:-1]),
    ],
)
async def test_what_may_tell_of_a_tenant_stays_where_it_is(
    kafka: KafkaSettings, producer: EventProducer, topic: str, value: bytes
):
    name = topic if topic == TENANTS else f"{topic}-{uuid.uuid4().hex[:8]}"
    offset = uuid.uuid4().int % 2**40
    record = SimpleNamespace(topic=name, partition=0, offset=offset, timestamp=1, key=b"acme", value=value, headers=())

    await dead_letter(producer, record, "undecodable", "it is cut", "lifecycle")

    [event] = [event for event in await found(kafka, name) if event.offset == offset]
    assert (event.key, event.value) == (b"acme", None)
    assert event.message == f"it is cut (its value of {len(value)} bytes is left out: it may hold a tenant's secrets)"
