"""Reads what a caller says about coming back: which stream, after which event, and what becomes of a call when its connection ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.resume import Wish
from schemas.errors import HeadraceError
from schemas.ids import is_request_id
from schemas.reasons import Reason

CANCEL, CONTINUE = "cancel", "continue"
WISH_FIELDS = frozenset({"last_event_id", "format", "include_usage"})
PREFIXES = {"chatcmpl-": False, "cmpl-": True}
"""What the ids of OpenAI's answers begin with, and whether the answer is a completion."""
FORMATS = {"chat": False, "completion": True}
_BOOLEANS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def wish(stream: str, given: Mapping[str, Any], cancel_on_disconnect: bool) -> Wish:
    """The stream named by a request id or by an answer's id, such as `chatcmpl-…`, and what is `given` of `last_event_id`, `format` (chat
    or completion) and `include_usage`. An event's id tells the last two itself.

    Raises HeadraceError: not_found if no stream can have this name; unsupported_parameter; invalid_request.
    """
    if unknown := sorted(given.keys() - WISH_FIELDS):
        raise HeadraceError(Reason.UNSUPPORTED_PARAMETER, f"{unknown[0]} is not a parameter", param=unknown[0])
    prefix = next((prefix for prefix in PREFIXES if stream.startswith(prefix)), "")
    request_id = stream.removeprefix(prefix)
    if not is_request_id(request_id):
        raise HeadraceError(Reason.NOT_FOUND, "there is no such stream")
    completions = PREFIXES.get(prefix, False)
    if given.get("format") is not None:
        completions = _one_of(FORMATS, given["format"], "format")
    include_usage = _one_of(_BOOLEANS, given.get("include_usage", False), "include_usage")
    last_event_id = given.get("last_event_id")
    if not isinstance(last_event_id, str | None):
        raise HeadraceError(Reason.INVALID_REQUEST, "last_event_id must be a string", param="last_event_id")
    return Wish(request_id, last_event_id or None, completions, include_usage, cancel_on_disconnect)


def on_disconnect(value: object, param: str, default: str = CANCEL) -> str:
    """`cancel` or `continue`; nothing is the default. Raises HeadraceError (invalid_request)."""
    if value is None:
        return default
    if value not in (CANCEL, CONTINUE):
        raise HeadraceError(Reason.INVALID_REQUEST, f"{param} must be {CANCEL} or {CONTINUE}", param=param)
    return str(value)


def _one_of(words: Mapping[Any, bool], value: object, param: str) -> bool:
    if not isinstance(value, str | bool) or value not in words:
        known = ", ".join(word for word in words if isinstance(word, str))
        raise HeadraceError(Reason.INVALID_REQUEST, f"{param} must be one of {known}", param=param)
    return words[value]
