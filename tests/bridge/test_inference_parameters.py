"""What a request's parameters and headers say together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.auth import Caller
from bridge.inference.parameters import read_wishes
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.topics import BATCH, INTERACTIVE

CALLER = Caller("t", "k", (INTERACTIVE, BATCH))
LIVE = Caller("t", "k", (INTERACTIVE,))


@given(
    st.none() | st.integers(0, 10**10),
    st.none() | st.integers(1, 10**7),
    st.none() | st.floats(0, 80_000),
)
def test_the_shortest_deadline_holds(timeout_us: int | None, header_ms: int | None, remaining_s: float | None) -> None:
    headers = {} if header_ms is None else {"x-headrace-timeout-ms": str(header_ms)}
    parameters = {} if timeout_us is None else {"timeout": timeout_us}
    found = read_wishes(CALLER, parameters, headers, remaining_s).timeout_ms
    limits = [
        timeout_us / 1_000 if timeout_us else None,
        header_ms,
        None if remaining_s is None else remaining_s * 1_000,
    ]
    known = [limit for limit in limits if limit is not None]
    if not known:
        assert found is None
    else:
        assert found is not None
        assert found >= 1
        assert abs(found - min(known)) <= 1


@pytest.mark.parametrize(
    ("parameters", "tier"),
    [({}, INTERACTIVE), ({"priority": 0}, INTERACTIVE), ({"priority": 1}, INTERACTIVE), ({"priority": 2}, BATCH), ({"tier": BATCH}, BATCH), ({"tier": BATCH, "priority": 0}, BATCH), ({"tier": BATCH, "priority": 9}, BATCH)],
)  # fmt: skip
def test_a_tier_by_name_or_number(parameters: dict[str, Any], tier: str) -> None:
    assert read_wishes(CALLER, parameters, {}).tier == tier
    if tier == BATCH:
        with pytest.raises(HeadraceError) as caught:
            read_wishes(LIVE, parameters, {})
        assert caught.value.reason is Reason.PERMISSION_DENIED


@pytest.mark.parametrize(
    "parameters",
    [{"tier": "shadow"}, {"tier": 1}, {"priority": "1"}, {"priority": -1}, {"priority": True}, {"priority": 1, "tier": BATCH}, {"timeout": 1.5}, {"timeout": -1}, {"timeout": 10**20}, {"idempotency_key": ""}, {"idempotency_key": 1}, {"cache_control": 1}, {"sequence_id": 4}],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(HeadraceError) as caught:
        read_wishes(CALLER, parameters, {})
    assert caught.value.reason in (Reason.INVALID_REQUEST, Reason.UNSUPPORTED_PARAMETER)


def test_what_is_left_is_the_models() -> None:
    found = read_wishes(CALLER, {"top_k": 3, "timeout": 5, "idempotency_key": "a"}, {"idempotency-key": "a"})
    assert (found.model, found.idempotency_key, found.timeout_ms) == ({"top_k": 3}, "a", 1)
    with pytest.raises(HeadraceError):
        read_wishes(CALLER, {"idempotency_key": "a"}, {"idempotency-key": "b"})
