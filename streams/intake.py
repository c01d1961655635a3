"""Reads a record of `requests.*`: its event, its grant, and what can be saved of one that is no event."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from decisions.validation import MODEL_CHARS_MAX, TIMEOUT_MS_MAX
from infra.grants import Grant, read
from infra.log import EventDecoder
from infra.tracing import find
from schemas.errors import HeadraceError, InvalidField, Undecodable
from schemas.events import Event, InferenceRequested, PayloadStored
from schemas.ids import is_request_id
from schemas.payloads import outline_of
from schemas.quick import quick
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER, RECORD_MAX_BYTES, TIMEOUT_HEADER
from streams.faust_shell import Record

GRANTS_MAX = 4_096
REKEYED_HEADER = "rekeyed"
TIMEOUT_DIGITS_MAX = 12


@quick
@dataclass(frozen=True, slots=True)
class Intake:
    """One record as read: `event` or `fault` is set, and `grant` or `grant_fault`.

    `timeout_ms` is what its header says of the deadline; `event` has it already, unless it is a reference.
    """

    record: Record
    event: Event | None
    fault: HeadraceError | None
    grant: Grant | None
    grant_fault: HeadraceError | None
    timeout_ms: int | None = None

    @property
    def rekeyed(self) -> bool:
        """Whether admission itself has sent it to this partition."""
        return any(name == REKEYED_HEADER for name, _ in self.record.headers)


async def read_record(record: Record, decoder: EventDecoder, secret: bytes) -> Intake:
    """Read a record, trusting nothing. Raises HeadraceError (unavailable) if its schema can't be looked up at present."""
    event: Event | None = None
    fault: HeadraceError | None = None
    timeout_ms: int | None = None
    try:
        event = await decoder.decode_record(record.value)
        timeout_ms = _timeout_ms(record)
    except Undecodable as error:
        fault = error
    if isinstance(event, InferenceRequested):
        event = shortened(event, timeout_ms)
    grant: Grant | None = None
    grant_fault: HeadraceError | None = None
    try:
        grant = _grant(record, secret)
    except HeadraceError as error:
        grant_fault = error
    return Intake(record, event, fault, grant, grant_fault, timeout_ms)


def shortened(request: InferenceRequested, timeout_ms: int | None) -> InferenceRequested:
    """The request with this deadline, if it is shorter than its own."""
    if timeout_ms is None or (request.timeout_ms is not None and request.timeout_ms <= timeout_ms):
        return request
    return replace(request, timeout_ms=timeout_ms)


def _timeout_ms(record: Record) -> int | None:
    """What the header says. Raises InvalidField."""
    value = find(record.headers, TIMEOUT_HEADER)
    if value is None:
        return None
    if not (value and len(value) <= TIMEOUT_DIGITS_MAX and value.isdigit() and 1 <= int(value) <= TIMEOUT_MS_MAX):
        text = f"the record's header {TIMEOUT_HEADER!r} must be a whole number of milliseconds between 1 and {TIMEOUT_MS_MAX}"
        raise InvalidField(text, param=TIMEOUT_HEADER)
    return int(value)


def _grant(record: Record, secret: bytes) -> Grant:
    token = find(record.headers, GRANT_HEADER)
    if token is None:
        raise HeadraceError(Reason.INVALID_GRANT, f"the record has no header {GRANT_HEADER!r}")
    try:
        text = token.decode("ascii")
    except UnicodeDecodeError:
        raise HeadraceError(Reason.INVALID_GRANT, "the grant is no token") from None
    return _verified(secret, text)


@lru_cache(maxsize=GRANTS_MAX)
def _verified(secret: bytes, token: str) -> Grant:
    """A caller's grant serves many requests; whether it is still in force is judged for each."""
    return read(secret, token)


@dataclass(frozen=True, slots=True)
class Salvage:
    """What a record that is no event still tells: the request's id ("" if it can't be read) and the model it names."""

    request_id: str
    model: str
    reason: Reason


def salvage(record: Record, fault: HeadraceError, event: Event | None = None) -> Salvage:
    """Look into a JSON record that is almost a request, or at an event whose headers are at fault."""
    reason = Reason.INVALID_REQUEST if isinstance(fault, InvalidField) else fault.reason
    if isinstance(event, PayloadStored):
        event = outline_of(event) or InferenceRequested(event.request_id, "")
    if isinstance(event, InferenceRequested):
        known = event.request_id if is_request_id(event.request_id) else ""
        return Salvage(known, event.model[:MODEL_CHARS_MAX], reason)
    found = _object(record.value)
    request_id, model = found.get("request_id"), found.get("model")
    known = request_id if isinstance(request_id, str) and is_request_id(request_id) else ""
    return Salvage(known, model[:MODEL_CHARS_MAX] if isinstance(model, str) and _is_text(model) else "", reason)


def _object(value: bytes | None) -> dict[str, Any]:
    if not value or value[:1] != b"{" or len(value) > RECORD_MAX_BYTES:
        return {}
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
