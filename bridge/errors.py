"""OpenAI's error shape, from what Headrace raises, from pydantic's findings, and from the endings in the log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from bridge.limits import rate_headers
from schemas.errors import HeadraceError
from schemas.events import InferenceRejected, Rates
from schemas.reasons import Reason, lookup

REQUEST_ID_HEADER = "X-Request-Id"
UNSUPPORTED = "unsupported_parameter"
"""The type of a pydantic error that stands for a parameter which this version doesn't serve."""


class Rejected(HeadraceError):
    """Admission refused the request. `rates`: what its tenant had left of its limits then, None if that isn't known."""

    def __init__(
        self, reason: Reason, message: str, *, param: str | None, retry_after_ms: int | None, rates: Rates | None
    ) -> None:
        super().__init__(reason, message, param=param, retry_after_ms=retry_after_ms)
        self.rates = rates


def rates_of(error: HeadraceError) -> Rates | None:
    """What an error tells of limits."""
    return error.rates if isinstance(error, Rejected) else None


def error_object(error: HeadraceError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, OpenAI's shape."""
    reason = error.reason
    return {"error": {"message": error.message, "type": reason.openai_type, "param": error.param, "code": reason.value}}


def error_response(error: HeadraceError, request_id: str | None = None, rates: Rates | None = None) -> Response:
    """The error as an HTTP response: the reason's status, OpenAI's object."""
    body = orjson.dumps(error_object(error))
    headers = error_headers(error, request_id, rates)
    return Response(body, error.reason.http_status, headers, media_type="application/json")


def error_headers(error: HeadraceError, request_id: str | None = None, rates: Rates | None = None) -> dict[str, str]:
    """What an error's response tells beside its body: Retry-After in whole seconds when a wait is known to help.

    `rates` are the limits told when the request was let in; a refusal tells its own.
    """
    headers = rate_headers(rates_of(error) or rates)
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    if request_id is not None:
        headers[REQUEST_ID_HEADER] = request_id
    if error.reason.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def unreachable() -> HeadraceError:
    """The log can't be reached."""
    return HeadraceError(Reason.UNAVAILABLE, Reason.UNAVAILABLE.text, retry_after_ms=1000)


def store_away() -> HeadraceError:
    """What is too large for the log alone can't be taken."""
    return HeadraceError(Reason.UNAVAILABLE, "The object store can't be reached at present.", retry_after_ms=1000)


def stopping() -> HeadraceError:
    """The process ends."""
    return HeadraceError(Reason.UNAVAILABLE, "this front door is stopping; try again", retry_after_ms=1000)


def rejection(event: InferenceRejected) -> HeadraceError:
    """Admission's refusal as an error; its parameter is named as the caller named it."""
    return Rejected(
        lookup(event.reason),
        event.message,
        param=caller_param(event.param),
        retry_after_ms=event.retry_after_ms,
        rates=event.rates,
    )


def caller_param(param: str | None) -> str | None:
    """A field of `InferenceRequested` by the name that OpenAI's bodies have for it."""
    if param is None:
        return None
    name = param.removeprefix("sampling.")
    return f"prompt{name.removeprefix('prompt_token_ids')}" if name.startswith("prompt_token_ids") else name


def from_validation(error: ValidationError) -> HeadraceError:
    """The first of pydantic's findings, named by its field. The caller's values aren't repeated."""
    found = error.errors(include_url=False, include_input=False)[0]
    param = path(found["loc"]) + str(found.get("ctx", {}).get("at", ""))
    if found["type"] == "extra_forbidden":
        return HeadraceError(Reason.UNSUPPORTED_PARAMETER, f"{param} is not a parameter that is served", param=param)
    if found["type"] == UNSUPPORTED:
        return HeadraceError(Reason.UNSUPPORTED_PARAMETER, f"{param}: {found['msg']}", param=param)
    if found["type"] == "missing":
        return HeadraceError(Reason.INVALID_REQUEST, f"{param} is required", param=param)
    return HeadraceError(
        Reason.INVALID_REQUEST, f"{param}: {_sentence(found)}" if param else _sentence(found), param=param or None
    )


def _sentence(found: Mapping[str, Any]) -> str:
    text = str(found["msg"])
    return text[:1].lower() + text[1:]


def path(location: Sequence[str | int]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    out = ""
    for part in location:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out
