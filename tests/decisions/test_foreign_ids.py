"""Ids that a direct producer made up: they are told back only where they are short, and name nothing that is remembered."""

from __future__ import annotations

import pytest

from decisions.admission import AFTER_TOKENISING, BEFORE_TOKENISING, cancel_refusal
from decisions.cases import judge
from decisions.verdicts import rejected
from schemas.events import InferenceCancelled
from schemas.ids import REQUEST_ID_CHARS
from tests.decisions.worlds import ID, NOW, FakeGrant, FakeWorld, case


@pytest.mark.parametrize(
    ("given", "told"),
    [("job-1", "job-1"), ("x" * REQUEST_ID_CHARS, "x" * REQUEST_ID_CHARS), ("x" * 500_000, ""), (ID + "!", "")],
)
def test_a_refusal_repeats_no_long_id(given: str, told: str) -> None:
    found, refusal = judge(case(request_id=given), FakeWorld(), (*BEFORE_TOKENISING, *AFTER_TOKENISING))
    assert refusal is not None
    event = rejected(found, refusal)
    assert event.request_id == told
    assert event.param == "request_id"
    assert "UUID of version 7" in event.message


@pytest.mark.parametrize("given", ["", "job-1", "x" * 500_000, ID.upper().replace("0", "A", 1), ID + " "])
def test_a_cancel_of_what_can_be_no_request_is_refused(given: str) -> None:
    refusal = cancel_refusal(InferenceCancelled(given, "acme"), FakeGrant(), "interactive", NOW)
    assert refusal is not None
    assert refusal.param == "request_id"
    assert len(refusal.message) < 200


def test_a_cancel_is_taken_by_its_grant() -> None:
    event = InferenceCancelled(ID, "acme")
    assert cancel_refusal(event, FakeGrant(), "interactive", NOW) is None
    late = cancel_refusal(event, FakeGrant(expires_ms=NOW), "interactive", NOW)
    assert late is not None
    assert late.param == "grant"
