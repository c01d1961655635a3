"""What can be asked again, under which id, in which tier, and for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decisions.dead_letters import asked_again, followed, tenant_of, tier_of
from schemas.errors import HeadraceError
from schemas.events import (
    InferenceCancelled,
    InferenceRequested,
    InferenceScheduled,
    Message,
    PayloadStored,
    Reply,
    Sampling,
)
from schemas.ids import request_id
from schemas.payloads import claim
from schemas.topics import REQUEST_MAX_BYTES, TOKENS

REQUESTED = InferenceRequested("old", "m", messages=(Message("user", "hi"),), timeout_ms=5_000)
SCHEDULED = InferenceScheduled(
    "old", "acme", "m", "1", "batch", (1, 2), Sampling(max_tokens=7), 10, 5, Reply(TOKENS, 3), "salt", stream=False
)


def test_a_request_is_asked_as_it_was_under_a_new_id() -> None:
    again = asked_again(replace(REQUESTED, door="a"), "new")
    assert (again.request_id, again.messages, again.timeout_ms) == ("new", REQUESTED.messages, 5_000)
    assert not again.door, "nobody at a front door waits for it"


def test_scheduled_work_is_asked_with_its_token_ids() -> None:
    again = asked_again(SCHEDULED, "new")
    assert (again.request_id, again.model, again.prompt_token_ids) == ("new", "m", (1, 2))
    assert (again.sampling, again.stream) == (SCHEDULED.sampling, False)


@pytest.mark.parametrize("event", [None, InferenceCancelled("old")])
def test_what_is_no_request_is_refused_with_advice(event: object) -> None:
    with pytest.raises(HeadraceError, match="drop it"):
        asked_again(event, "new")


def test_the_tier_is_that_of_the_work_or_of_the_topic() -> None:
    assert tier_of("work.m.1.batch", SCHEDULED) == "batch"
    assert tier_of("requests.interactive", REQUESTED) == "interactive"
    with pytest.raises(HeadraceError, match="no tier"):
        tier_of("tokens", REQUESTED)


def test_work_names_its_tenant_and_a_request_s_key_does() -> None:
    assert tenant_of(b"a request's id", SCHEDULED) == "acme"
    assert tenant_of(b"acme", REQUESTED) == "acme"
    assert tenant_of(None, REQUESTED) is None


def reference(event: str = "InferenceRequested", tenant: str = "acme", size_bytes: int = 1_000_000) -> PayloadStored:
    return PayloadStored(request_id(0, bytes(10)), tenant, event, "0" * 64, size_bytes)


def test_a_reference_names_its_tenant_where_its_key_does_not() -> None:
    assert tenant_of(b"a partition", reference("InferenceScheduled")) == "acme"
    assert tenant_of(None, reference()) == "acme"
    assert tenant_of(b"other", reference()) == "other"


@pytest.mark.parametrize("event", ["InferenceRequested", "InferenceScheduled"])
def test_a_tenants_own_requests_and_work_are_followed_and_no_others(event: str) -> None:
    followed(reference(event), "acme")
    with pytest.raises(HeadraceError, match="another tenant's"):
        followed(reference(event), "other")
    with pytest.raises(HeadraceError, match="at most"):
        followed(reference(event, size_bytes=2 * REQUEST_MAX_BYTES), "acme")
    with pytest.raises(HeadraceError, match="tenant"):
        followed(reference(event, tenant="../acme"), "../acme")


@pytest.mark.parametrize("event", ["InferenceCompleted", "TokensGenerated", "nothing"])
def test_what_a_reference_says_is_no_request_is_not_followed(event: str) -> None:
    with pytest.raises(HeadraceError, match="drop it"):
        followed(reference(event), "acme")


@pytest.mark.parametrize("event", [replace(REQUESTED, messages=None, prompt_token_ids=(1, 2)), SCHEDULED])
def test_token_ids_may_take_as_much_as_a_request_of_them(event: InferenceRequested | InferenceScheduled) -> None:
    """Four bytes each, which is more than the same text."""
    found, _ = claim(replace(event, request_id=request_id(0, bytes(10))), None, "acme", "avro")
    followed(replace(found, size_bytes=REQUEST_MAX_BYTES + REQUEST_MAX_BYTES // 2), "acme")
    with pytest.raises(HeadraceError, match="at most"):
        followed(replace(found, size_bytes=3 * REQUEST_MAX_BYTES), "acme")
