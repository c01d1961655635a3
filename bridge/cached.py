"""What a caller says of the response cache, and what it is told of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decisions.cache import HIT, MISS, parse
from schemas.errors import HeadraceError
from schemas.events import GenerationStarted, InferenceRequested
from schemas.reasons import Reason

if TYPE_CHECKING:
    from bridge.calls import Leg

CACHE_HEADER = "X-Headrace-Cache"
AGE_HEADER = "Age"
CONTROL_HEADER = "Cache-Control"
CONTROL_FIELD = "cache_control"


def told(event: GenerationStarted) -> int | None:
    """How old the answer is that an event begins, in milliseconds; -1 for one that is new and will be kept, None for any other."""
    if event.cache_age_ms is not None:
        return event.cache_age_ms
    return NEW_MS if event.cache_key else None


NEW_MS = -1


def with_control(requests: Iterable[InferenceRequested], control: object, param: str) -> list[InferenceRequested]:
    """The requests with what their caller says of the cache. Raises HeadraceError (invalid_request) naming `param`."""
    if control is None:
        return list(requests)
    if not isinstance(control, str):
        raise HeadraceError(Reason.INVALID_REQUEST, f"{param} must be a string", param=param)
    try:
        parse(control)
    except ValueError as error:
        raise HeadraceError(Reason.INVALID_REQUEST, f"{param}: {error}", param=param) from None
    return [replace(request, cache_control=control) for request in requests]


def _outcome(legs: Iterable[Leg]) -> tuple[str, int] | None:
    """`hit` and the age of the oldest, if all are from the cache; `miss` if some are new and will be kept; None where it plays no part."""
    ages = [leg.cached_ms for leg in legs]
    known = [age for age in ages if age is not None]
    if not known:
        return None
    hit = len(known) == len(ages) and NEW_MS not in known
    return (HIT, max(known)) if hit else (MISS, 0)


def cache_headers(legs: Iterable[Leg]) -> dict[str, str]:
    """`X-Headrace-Cache`, and of a hit `Age` in seconds; none where the cache plays no part."""
    found = _outcome(legs)
    if found is None:
        return {}
    outcome, age_ms = found
    return {CACHE_HEADER: outcome} | ({AGE_HEADER: str(age_ms // 1_000)} if outcome == HIT else {})


def cache_object(legs: Iterable[Leg]) -> dict[str, Any]:
    """The same as `cache` of a socket's message: `outcome`, and of a hit `age_ms`."""
    found = _outcome(legs)
    if found is None:
        return {}
    outcome, age_ms = found
    return {"cache": {"outcome": outcome} | ({"age_ms": age_ms} if outcome == HIT else {})}
