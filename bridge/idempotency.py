"""What a caller says so that its request is answered once however often it is sent, and what it hears when it was sent before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from bridge.calls import Call
from decisions.idempotency import fingerprint
from decisions.validation import key_problem
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested
from schemas.reasons import Reason

KEY_HEADER = "Idempotency-Key"
KEY_FIELD = "idempotency_key"
REPLAYED_HEADER = "Idempotent-Replayed"
"""Stripe's name for it."""


def read_key(value: object, param: str) -> str:
    """The key that a caller gave, "" without one. Raises HeadraceError (invalid_request)."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise HeadraceError(Reason.INVALID_REQUEST, f"{param} must be a string", param=param)
    if (found := key_problem(value, param)) is not None:
        raise HeadraceError(Reason.INVALID_REQUEST, found.message, param=param)
    return value


def with_key(requests: Sequence[InferenceRequested], key: str) -> Sequence[InferenceRequested]:
    """A call's requests under its key. Of several, each tells all that the call asks: with one more or other prompt it is another call."""
    if not key:
        return requests
    if len(requests) == 1:
        return [replace(requests[0], idempotency_key=key)]
    whole = _digest("".join(map(fingerprint, requests)))
    keys = [key, *(f"{_digest(key)} {place}" for place in range(1, len(requests)))]
    return [
        replace(request, idempotency_key=own, call=f"{whole} {place}")
        for place, (request, own) in enumerate(zip(requests, keys, strict=True))
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def replay_headers(call: Call) -> dict[str, str]:
    """The header that says that the answer was made for an earlier request."""
    return {REPLAYED_HEADER: "true"} if call.replayed else {}
