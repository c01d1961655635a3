"""What is read off the log: a newer writer's events by their schemas, and junk told apart from them."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest

from infra import log as log_module
from infra.log import EventDecoder, EventProducer
from infra.read import read_to_end
from infra.settings import KafkaSettings
from schemas.codec import MARKER, encode, encode_json, fingerprint, own_schemas
from schemas.errors import Undecodable, UnknownSchema
from schemas.events import InferenceCancelled, SchemaPublished
from schemas.topics import SCHEMAS


def foreign_schema() -> tuple[dict[str, Any], bytes]:
    """What a newer writer's InferenceCancelled may look like: one field more, with a random name."""
    schema = json.loads(json.dumps(own_schemas()["InferenceCancelled"]))
    schema["fields"].append({"name": f"x{uuid.uuid4().hex[:8]}", "type": "int", "default": 0})
    value = encode(InferenceCancelled("r", "t"))
    return schema, b"\xc3\x01" + bytes.fromhex(fingerprint(schema)) + value[10:] + b"\x02"


async def test_a_newer_writers_schema_is_found_in_the_log(kafka: KafkaSettings, producer: EventProducer):
    decoder = EventDecoder(kafka)
    schema, value = foreign_schema()
    with pytest.raises(UnknownSchema):
        await EventDecoder(kafka).decode(value)

    mark = fingerprint(schema)
    event = SchemaPublished(mark, "InferenceCancelled", json.dumps(schema))
    await producer.send_and_wait(SCHEMAS, event, key=mark)

    assert await decoder.decode(value) == InferenceCancelled("r", "t")
    assert decoder.codec.decode(value) == InferenceCancelled("r", "t")


async def test_an_unknown_schema_is_looked_for_again_after_a_while(
    kafka: KafkaSettings, producer: EventProducer, monkeypatch
):
    decoder = EventDecoder(kafka)
    schema, value = foreign_schema()
    with pytest.raises(UnknownSchema):
        await decoder.decode(value)
    mark = fingerprint(schema)
    await producer.send_and_wait(SCHEMAS, SchemaPublished(mark, "InferenceCancelled", json.dumps(schema)), key=mark)
    with pytest.raises(UnknownSchema):
        await decoder.decode(value)
    decoder._unknown[mark] = 0.0
    assert await decoder.decode(value) == InferenceCancelled("r", "t")


async def test_one_reading_of_the_schemas_serves_all_who_wait(kafka: KafkaSettings, monkeypatch):
    """Junk with a hundred made-up fingerprints must not cost a hundred readings, one after the other."""
    readings = []

    def counted(*args: Any) -> Any:
        readings.append(args)
        return read_to_end(*args)

    monkeypatch.setattr(log_module, "read_to_end", counted)
    decoder = EventDecoder(kafka)
    junk = [MARKER + number.to_bytes(8, "big") for number in range(100)]
    found = await asyncio.gather(*(decoder.decode(value) for value in junk), return_exceptions=True)
    assert all(isinstance(error, UnknownSchema) for error in found)
    assert len(readings) <= 2


@pytest.mark.parametrize(
    "junk", [None, b"", b"\xff\x00", b"{", b"{}", b"\xc3\x01", encode(InferenceCancelled("r", "t"))[:-1]]
)
async def test_junk_is_undecodable_without_a_look_up(junk: bytes | None):
    with pytest.raises(Undecodable):
        await EventDecoder(KafkaSettings("127.0.0.1:1")).decode(junk)


async def test_own_events_need_no_look_up():
    decoder = EventDecoder(KafkaSettings("127.0.0.1:1"))
    event = InferenceCancelled("r", "t")
    assert await decoder.decode(encode(event)) == await decoder.decode(encode_json(event)) == event
