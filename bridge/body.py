"""Reads a request's body within its limits, and JSON that is text all through."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request

from bridge.compression import coding_of, decompressed
from bridge.errors import path
from bridge.heads import heads
from schemas.errors import HeadraceError
from schemas.reasons import Reason

BODY_READ_MAX_S = 60.0
"""How long a caller may take to send its body."""
PARSED_AT_ONCE_BYTES = 256 * 1024

T = TypeVar("T")


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body, decompressed. Raises HeadraceError: payload_too_large as soon as it is known to pass `bytes_max`; invalid_request if it stalls."""
    headers = heads(request)
    coding = coding_of(headers.get("content-encoding", ""))
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_READ_MAX_S):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise HeadraceError(Reason.CANCELLED, "the caller left before its body was sent")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > bytes_max:
                    raise _too_large(bytes_max)
                chunks.append(chunk)
                more = message.get("more_body", False)
    except TimeoutError:
        raise HeadraceError(Reason.INVALID_REQUEST, f"the body wasn't sent within {BODY_READ_MAX_S:g} s") from None
    raw = b"".join(chunks)
    return raw if coding is None else await asyncio.to_thread(decompressed, raw, coding, bytes_max)


async def parsed_beside(raw: bytes | str, parse: Callable[[], T]) -> T:
    """What `parse` makes of a body: in a thread if the body is large, so that others' streams go on."""
    return parse() if len(raw) <= PARSED_AT_ONCE_BYTES else await asyncio.to_thread(parse)


def _too_large(bytes_max: int) -> HeadraceError:
    return HeadraceError(Reason.PAYLOAD_TOO_LARGE, f"the body has more than {bytes_max} bytes, the most that is taken")


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """The JSON object in `raw`. Raises HeadraceError (invalid_request) that names the place of what is no JSON or no text.

    Nesting is bounded by orjson (1024 levels). Bytes that are no UTF-8, and escapes of unpaired surrogates, are refused.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _explain(raw, str(error)) from None
    if not isinstance(value, dict):
        raise HeadraceError(Reason.INVALID_REQUEST, "the body must be a JSON object")
    return value


def _explain(raw: bytes | str, found: str) -> HeadraceError:
    """Reads the body leniently to name the field whose text is none."""
    lenient = raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")
    try:
        where = _not_text(json.loads(lenient))
    except (ValueError, RecursionError):
        where = None
    if where is None:
        return HeadraceError(Reason.INVALID_REQUEST, f"the body is not JSON: {found}")
    return HeadraceError(
        Reason.INVALID_REQUEST,
        f"{where or 'a key'} holds an unpaired surrogate or bytes that are not UTF-8",
        param=where or None,
    )


def _not_text(value: Any) -> str | None:
    """The path of a string that can't be encoded; an object's for one of its keys; None if all can."""
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while stack:
        where, item = stack.pop()
        if isinstance(item, dict):
            if not all(map(_is_text, item)):
                return path(where)
            stack.extend(((*where, key), inner) for key, inner in item.items())
        elif isinstance(item, list):
            stack.extend(((*where, i), inner) for i, inner in enumerate(item))
        elif isinstance(item, str) and not _is_text(item):
            return path(where)
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
