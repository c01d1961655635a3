"""One gRPC call: its message is read once its caller may ask, and whatever is raised becomes a status, with what else there is to tell of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from bridge.answer_headers import answer_headers
from bridge.auth import Caller
from bridge.body import BODY_READ_MAX_S, parsed_beside
from bridge.calls import Call
from bridge.errors import rates_of
from bridge.limits import rate_headers
from bridge.observe import refused
from schemas.errors import HeadraceError
from schemas.reasons import Reason

REASON, RETRY_AFTER = "headrace-reason", "retry-after"
"""What is told beside an error."""
ERROR_CHARS_MAX, ERROR_BYTES_MAX = 1_000, 6_000
"""Of an error's text in the trailers; clients take 8 KiB of them."""
END_GRACE_S = 2.0
"""How long what ends early may take to tell so: a call its status, and the requests of a stream their own ends."""

Context = Any  # grpc.aio.ServicerContext, generic in what its stubs don't agree on
Handler = Callable[[Any, Context], Awaitable[Any]]
CallersHandler = Callable[[Any, Caller, Context], Awaitable[Any]]

_log = structlog.get_logger(__name__)


def unary(handler: Handler, kind: Any) -> Handler:
    """Reads the one message of a call, whoever calls."""

    async def answer(requests: AsyncIterator[bytes], context: Context) -> Any:
        return await handler(await _only_message(requests, kind), context)

    return answer


def callers_unary(handler: CallersHandler, kind: Any, caller_of: Callable[[Context], Awaitable[Caller]]) -> Handler:
    """The same once `caller_of` has found the caller, who is found but once."""

    async def answer(requests: AsyncIterator[bytes], context: Context) -> Any:
        caller = await caller_of(context)
        return await handler(await _only_message(requests, kind), caller, context)

    return answer


async def _only_message(requests: AsyncIterator[bytes], kind: Any) -> Any:
    reading = next_message(requests)
    done, _ = await asyncio.wait({reading}, timeout=BODY_READ_MAX_S)
    if not done:
        raise HeadraceError(Reason.INVALID_REQUEST, f"the message wasn't sent within {BODY_READ_MAX_S:g} s")
    raw = reading.result()
    if raw is None:
        raise HeadraceError(Reason.INVALID_REQUEST, "the call has no message")
    return await parsed(kind, raw)


def next_message(requests: AsyncIterator[bytes]) -> asyncio.Task[bytes | None]:
    """The next message; None at the end. It is never cancelled, for gRPC's core writes to its memory: it ends with the call."""

    async def read() -> bytes | None:
        return await anext(requests, None)

    task = asyncio.create_task(read(), name="grpc-read")
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


async def parsed(kind: Any, raw: bytes) -> Any:
    """A message of this kind. Raises HeadraceError (invalid_request)."""
    try:
        return await parsed_beside(raw, lambda: kind.FromString(raw))
    except DecodeError:
        raise HeadraceError(Reason.INVALID_REQUEST, f"the message is no {kind.DESCRIPTOR.name}") from None


def answering(handler: Handler) -> Handler:
    """Whatever is raised becomes a status."""

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await handler(request, context)
        except HeadraceError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            _log.exception("an inference call failed")
            await abort(context, HeadraceError(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text))

    return answer


async def abort(context: Context, error: HeadraceError, call: Call | None = None) -> None:
    """Ends a call by the status of an error, with what else there is to tell of it: `call` if it had begun."""
    refused(error.reason.value)
    told = [(REASON, error.reason.value), *(trailers(call) if call else ()), *rate_headers(rates_of(error)).items()]
    if error.retry_after_ms is not None:
        told.append((RETRY_AFTER, str(in_seconds(error.retry_after_ms))))
    try:
        async with asyncio.timeout(END_GRACE_S):
            await context.abort(grpc.StatusCode[error.reason.grpc_code], details(error.message), tuple(told))
    except TimeoutError:  # it is on its way, behind what the caller hasn't read yet
        raise grpc.aio.AbortError from None


def in_seconds(retry_after_ms: int) -> int:
    """When to come again, as it is told: in whole seconds, and never at once."""
    return max(1, math.ceil(retry_after_ms / 1000))


def details(text: str) -> str:
    """As much of an error's text as a trailer takes: on the wire a character has up to 12 bytes."""
    text = text[:ERROR_CHARS_MAX]
    return text if len(quote(text)) <= ERROR_BYTES_MAX else text[: ERROR_BYTES_MAX // 12]


def trailers(call: Call) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a call that began."""
    return tuple((name.lower(), value) for name, value in answer_headers(call).items())


def headers_of(context: Context) -> dict[str, str]:
    """A call's metadata that is text, as a REST call has headers."""
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
