"""What a request's parameters mean that hold for every model: its deadline, tier, idempotency key, and use of the response cache.

`timeout` is in microseconds, and `priority` is 1 or lower tiers with higher numbers, both as Triton has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.auth import Caller
from bridge.cached import CONTROL_FIELD, CONTROL_HEADER
from bridge.idempotency import KEY_FIELD, KEY_HEADER, read_key
from bridge.inference.asking import Parameters, Scalar
from bridge.inference.elements import invalid
from decisions.validation import TIMEOUT_MS_MAX
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.topics import BATCH, INTERACTIVE

TIMEOUT, TIER, PRIORITY = "timeout", "tier", "priority"
TIMEOUT_HEADER = "X-Headrace-Timeout-Ms"
SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
TIERS = (INTERACTIVE, BATCH)
_OWN = (TIMEOUT, TIER, PRIORITY, KEY_FIELD, CONTROL_FIELD)


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a request wants to be served. `model` are the parameters left, which are its model's."""

    timeout_ms: int | None
    tier: str
    idempotency_key: str
    cache_control: str | None
    model: Parameters


def read_wishes(
    caller: Caller, parameters: Parameters, headers: Mapping[str, str], remaining_s: float | None = None
) -> Wishes:
    """From a request's parameters, and headers, which may say the same. The shortest deadline holds, `remaining_s` among them.

    Raises HeadraceError: invalid_request, unsupported_parameter, permission_denied.
    """
    for name in SEQUENCES:
        if parameters.get(name):
            raise HeadraceError(Reason.UNSUPPORTED_PARAMETER, f"{name}: sequences are not served", param=name)
    return Wishes(
        _timeout_ms(parameters.get(TIMEOUT), headers, remaining_s),
        _tier(caller, parameters),
        _either(parameters.get(KEY_FIELD), headers.get(KEY_HEADER.lower()), KEY_FIELD, KEY_HEADER),
        _text(parameters.get(CONTROL_FIELD), CONTROL_FIELD) or headers.get(CONTROL_HEADER.lower()),
        {name: value for name, value in parameters.items() if name not in _OWN and name not in SEQUENCES},
    )


def _timeout_ms(given: Scalar | None, headers: Mapping[str, str], remaining_s: float | None) -> int | None:
    limits: list[int] = []
    if given is not None:
        if type(given) is not int or not 0 <= given <= TIMEOUT_MS_MAX * 1_000:
            raise invalid(
                f"{TIMEOUT} must be a whole number of microseconds, at most {TIMEOUT_MS_MAX * 1_000}", TIMEOUT
            )
        if given:  # 0 is Triton's word for none
            limits.append(math.ceil(given / 1_000))
    told = headers.get(TIMEOUT_HEADER.lower())
    if told is not None:
        if not (told.isascii() and told.isdecimal() and len(told) <= 12):
            raise invalid(f"{TIMEOUT_HEADER} must be a whole number of milliseconds", TIMEOUT_HEADER)
        limits.append(int(told))
    if remaining_s is not None and remaining_s * 1_000 < TIMEOUT_MS_MAX:
        limits.append(max(1, math.floor(remaining_s * 1_000)))
    return min(limits) if limits else None


def _tier(caller: Caller, parameters: Parameters) -> str:
    tier, priority = _text(parameters.get(TIER), TIER), parameters.get(PRIORITY)
    if tier is not None and tier not in TIERS:
        raise invalid(f"{TIER} must be one of {', '.join(TIERS)}", TIER)
    if priority is not None:
        if type(priority) is not int or priority < 0:
            raise invalid(f"{PRIORITY} must be a whole number: 1 is {INTERACTIVE}, above it is {BATCH}", PRIORITY)
        by_priority = {0: None, 1: INTERACTIVE}.get(priority, BATCH)
        if tier and by_priority and tier != by_priority:
            raise invalid(f"{PRIORITY} {priority} contradicts {TIER} {tier}", PRIORITY)
        tier = tier or by_priority
    tier = tier or INTERACTIVE
    if tier not in caller.tiers:
        raise HeadraceError(Reason.PERMISSION_DENIED, f"the API key may not make {tier} calls", param=TIER)
    return tier


def _either(given: object, header: str | None, field: str, name: str) -> str:
    own, told = read_key(given, field), read_key(header, name)
    if own and told and own != told:
        raise invalid(f"{field} and the header {name} differ", field)
    return own or told


def _text(value: Scalar | None, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise invalid(f"{name} must be a string", name)
    return value
