"""Puts a record that can't be processed aside, raw, where people can look at it and why it was refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infra import metrics
from infra.log import EventProducer, RecordTooLarge
from infra.redact import is_secret
from schemas.codec import published
from schemas.events import RecordDeadLettered, TenantChanged
from schemas.topics import DEAD_LETTERS, TENANTS

MESSAGE_CHARS_MAX = 2_000
HEADER_BYTES_MAX = 4_096
HEADERS_MAX = 32
KEY_BYTES_MAX = 4_096
CUT_VALUE_BYTES = 1024 * 1024  # what is kept of a value too large to be wrapped
_OF_A_TENANT = (bytes.fromhex(published(TenantChanged).fingerprint), b'"TenantChanged"')


async def dead_letter(
    producer: EventProducer, record: Any, reason: str, message: str, process: str, event: object = None
) -> None:
    """Write the record to `dead-letters` and return when the broker has it.

    `record` is a ConsumerRecord or has its `topic`, `partition`, `offset`, `timestamp`, `key`, `value`, `headers`. `event` is what it
    holds, where that could be read: what an older version wrote isn't known by its bytes.
    The grant and other headers of secrets are left out, and so is a value that may tell of a tenant, whose salt and keys' hashes few may see. Only
    a value that would make the record too large is cut. The message says so.
    Raises `NotDelivered` when the broker can't be reached.
    """
    value, omitted = _value(record, event)
    letter = RecordDeadLettered(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp,
        key=None if record.key is None else bytes(record.key)[:KEY_BYTES_MAX],
        value=value,
        headers=_headers(record.headers),
        reason=reason,
        message=_text(message) + omitted,
        process=process,
    )
    try:
        await producer.send_and_wait(DEAD_LETTERS, letter, key=letter.topic)
    except RecordTooLarge:
        await producer.send_and_wait(DEAD_LETTERS, _cut(letter), key=letter.topic)
    metrics.DEAD_LETTERS.labels(metrics.topic_label(record.topic), reason).inc()


def _headers(headers: Any) -> dict[str, bytes]:
    kept: dict[str, bytes] = {}
    for name, value in list(headers or ())[:HEADERS_MAX]:
        if not is_secret(name):
            kept[_text(name)[:HEADER_BYTES_MAX]] = bytes(value or b"")[:HEADER_BYTES_MAX]
    return kept


def _value(record: Any, event: object) -> tuple[bytes | None, str]:
    """What is kept of the value, and what is said of what isn't."""
    value: bytes | None = record.value
    of_a_tenant = record.topic == TENANTS or isinstance(event, TenantChanged)
    if not value or not (of_a_tenant or any(mark in value for mark in _OF_A_TENANT)):
        return value, ""
    return None, f" (its value of {len(value)} bytes is left out: it may hold a tenant's secrets)"


def _text(text: str) -> str:
    return text[:MESSAGE_CHARS_MAX].encode("utf-8", "replace").decode()


def _cut(event: RecordDeadLettered) -> RecordDeadLettered:
    value = event.value or b""
    message = f"{event.message} (the first {CUT_VALUE_BYTES} of {len(value)} bytes are kept)"
    return replace(event, value=value[:CUT_VALUE_BYTES], message=message)
