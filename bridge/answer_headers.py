"""What the response that carries an answer tells beside it."""

from __future__ import annotations

from bridge.cached import cache_headers
from bridge.calls import Call
from bridge.errors import REQUEST_ID_HEADER
from bridge.idempotency import replay_headers
from bridge.limits import rate_headers


def answer_headers(call: Call) -> dict[str, str]:
    """The request's id, what is left of the limits, and whether the answer is a repeat's or out of the cache."""
    return {
        REQUEST_ID_HEADER: call.request_id,
        **rate_headers(call.rates),
        **replay_headers(call),
        **cache_headers(call.legs),
    }
