"""What a caller is told of its limits: OpenAI's headers, and the same as an object for those who get no headers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from decisions.quota import headers, tightest
from schemas.events import Rates

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


def least(told: Iterable[Rates | None]) -> Rates | None:
    """Of what several requests were told, for requests and for tokens the one with the least left; None if none was told anything."""
    known = [rates for rates in told if rates is not None]
    if not known:
        return None
    return Rates(
        tightest(rates.requests for rates in known if rates.requests is not None),
        tightest(rates.tokens for rates in known if rates.tokens is not None),
    )


def rate_headers(told: Rates | None) -> dict[str, str]:
    """OpenAI's headers; none if no limit holds."""
    return {} if told is None else headers(told)


def rate_object(told: Rates | None) -> dict[str, Any]:
    """`rate_limits` of a socket's message: `requests` and `tokens`, each with `limit`, `remaining` and `reset_ms`; empty if no limit holds."""
    found = {} if told is None else {unit: rate for unit, rate in asdict(told).items() if rate is not None}
    return {"rate_limits": found} if found else {}
