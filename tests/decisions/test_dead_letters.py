"""What can be asked again, under which id, in which tier, and for whom."""

from __future__ import annotations

import pytest

from decisions.dead_letters import asked_again, tenant_of, tier_of
from schemas.errors import HeadraceError
from schemas.events import InferenceCancelled, InferenceRequested, InferenceScheduled, Message, Reply, Sampling
from schemas.topics import TOKENS

REQUESTED = InferenceRequested("old", "m", messages=(Message("user", "hi"),), timeout_ms=5_000)
SCHEDULED = InferenceScheduled(
    "old", "acme", "m", "1", "batch", (1, 2), Sampling(max_tokens=7), 10, 5, Reply(TOKENS, 3), "salt", stream=False
)


def test_a_request_is_asked_as_it_was_under_a_new_id() -> None:
    again = asked_again(REQUESTED, "new")
    assert (again.request_id, again.messages, again.timeout_ms) == ("new", REQUESTED.messages, 5_000)


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
