"""What a record of `requests.*` says, in its value and in its headers."""

from __future__ import annotations

from typing import Any

import pytest

from infra.grants import Grant, mint
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.errors import InvalidField
from schemas.events import InferenceRejected, InferenceRequested, PayloadStored, Reply
from schemas.topics import GRANT_HEADER, LIFECYCLE, TIMEOUT_HEADER, TOKENS, requests_topic
from streams.faust_shell import Record
from streams.intake import read_record, salvage, shortened
from tests.decisions.worlds import ID, NOW
from tests.streams.test_admission_faults import SECRET, Producer, admission_with

REFERENCE = PayloadStored(ID, "acme", "InferenceRequested", "0" * 64, 1_000_000)


def record(event: Any, *headers: tuple[str, bytes]) -> Record:
    grant = mint(SECRET, Grant("acme", "k1", ("interactive",), Reply(TOKENS, 1), NOW + 60_000))
    found = ((GRANT_HEADER, grant.encode()), *headers)
    return Record(requests_topic("interactive"), 0, 7, NOW, b"acme", encode(event), found)


def request(timeout_ms: int | None = None) -> InferenceRequested:
    return InferenceRequested(ID, "m", prompt="x", timeout_ms=timeout_ms)


@pytest.mark.parametrize(
    ("given", "header", "holds"),
    [(None, None, None), (None, b"250", 250), (400, b"250", 250), (100, b"250", 100), (100, None, 100)],
)
async def test_the_shorter_of_header_and_field_holds(
    given: int | None, header: bytes | None, holds: int | None
) -> None:
    headers = () if header is None else ((TIMEOUT_HEADER, header),)
    found = await read_record(record(request(given), *headers), EventDecoder(KafkaSettings()), SECRET)
    assert found.event == request(holds)
    referred = await read_record(record(REFERENCE, *headers), EventDecoder(KafkaSettings()), SECRET)
    assert referred.event == REFERENCE
    assert shortened(request(given), referred.timeout_ms) == request(holds)


@pytest.mark.parametrize("header", [b"", b"0", b"-1", b"1.5", b" 5", b"1e3", b"\xff", b"86400001", b"9" * 5000])
@pytest.mark.parametrize("event", [request(100), REFERENCE])
async def test_a_header_that_is_no_deadline_is_a_fault_of_the_request(event: Any, header: bytes) -> None:
    found = await read_record(record(event, (TIMEOUT_HEADER, header)), EventDecoder(KafkaSettings()), SECRET)
    assert isinstance(found.fault, InvalidField)
    assert found.fault.param == TIMEOUT_HEADER
    saved = salvage(found.record, found.fault, found.event)
    assert (saved.request_id, saved.reason.value) == (ID, "invalid_request")


async def test_who_gives_it_hears_so() -> None:
    producer = Producer()
    await admission_with(producer).handle(record(request(), (TIMEOUT_HEADER, b"soon")))
    told = dict(producer.events)
    assert set(told) == {TOKENS, LIFECYCLE}
    assert isinstance(told[TOKENS], InferenceRejected)
    assert (told[TOKENS].request_id, told[TOKENS].model, told[TOKENS].reason) == (ID, "m", "invalid_request")
    assert told[TOKENS].param == TIMEOUT_HEADER
    assert TIMEOUT_HEADER in told[TOKENS].message
