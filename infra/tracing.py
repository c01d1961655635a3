"""W3C Trace Context (Recommendation, 23 November 2021) in record headers: `traceparent` and `tracestate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from schemas.topics import TRACEPARENT_HEADER, TRACESTATE_HEADER

STATE_BYTES_MAX = 512
SAMPLED = "01"

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_random = Random()  # ids are no secrets, and the system's own randomness lets other threads in each time

Headers = Sequence[tuple[str, bytes]]


def new_traceparent() -> str:
    """The start of a new trace, sampled."""
    return f"00-{_id(16)}-{_id(8)}-{SAMPLED}"


def trace_id(headers: Headers) -> str | None:
    """The trace that the headers belong to, as 32 hex digits, or None."""
    parts = _parse(find(headers, TRACEPARENT_HEADER))
    return None if parts is None else parts[0]


def child(headers: Headers) -> Headers:
    """The headers of what these caused: the same trace with a new span, or a new trace if there is none (or none valid)."""
    given = find(headers, TRACEPARENT_HEADER)
    parts = None if given is None else _parse(given)
    if parts is None:
        return ((TRACEPARENT_HEADER, new_traceparent().encode()),)
    trace, flags = parts
    parent = (TRACEPARENT_HEADER, f"00-{trace}-{_id(8)}-{flags}".encode())
    state = find(headers, TRACESTATE_HEADER)
    if state is None or len(state) > STATE_BYTES_MAX:
        return (parent,)
    return (parent, (TRACESTATE_HEADER, state))


def find(headers: Headers, name: str) -> bytes | None:
    """The value of a record's header; None if it has none of this name."""
    for key, value in headers:
        if key == name:
            return value
    return None


def _parse(value: bytes | None) -> tuple[str, str] | None:
    """Trace id and flags. A later version may have more after the flags; version ff and all-zero ids are invalid."""
    found = _PARENT.fullmatch((value or b"").decode("ascii", "replace"))
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or not int(trace, 16) or not int(span, 16) or (more and version == "00"):
        return None
    return trace, flags


def _id(size: int) -> str:
    while not (number := _random.getrandbits(8 * size)):
        pass
    return f"{number:0{2 * size}x}"
