"""Which requests are let in, in what words they are refused, and what a verdict becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.admission import reply_refusal
from decisions.cases import Refusal, refuse
from decisions.verdicts import CANCEL, REVOKED_TEXT, YIELDED_TEXT, admitted, cancelled, rejected, revoked, yielded
from schemas.events import (
    ApiKey,
    Decision,
    InferenceCancelled,
    Position,
    Reply,
    Sampling,
)
from schemas.reasons import Reason
from tests.decisions.judging import PROMPT, decide, refused, taking
from tests.decisions.worlds import ID, NOW, WORK, FakeGrant, FakeWorld, case, worker


def test_a_good_request_is_admitted_with_every_check_on_record() -> None:
    found, refusal = decide(case(), FakeWorld())
    assert refusal is None
    names = [decision.check for decision in found.decisions]
    assert names == [
        "reply",
        "grant",
        "validation",
        "route",
        "tokenise",
        "vocabulary",
        "context",
        "deadline",
        "wait",
        "quota",
        "place",
    ]
    scheduled, admission = admitted(found)
    assert scheduled.prompt_token_ids == PROMPT
    assert scheduled.sampling.max_tokens == 98
    assert (scheduled.tenant, scheduled.model, scheduled.version, scheduled.tier) == ("acme", "m", "v1", "interactive")
    assert scheduled.cache_salt == "salt"
    assert scheduled.deadline_ms == NOW + 5_000
    assert scheduled.source == Position("requests.interactive", 2, 7)
    assert scheduled.reply == Reply("tokens", 1)
    assert (admission.work_topic, admission.prompt_tokens, admission.max_tokens, admission.reserved_tokens) == (
        WORK,
        2,
        98,
        100,
    )
    assert 0 <= admission.work_partition < 4
    assert admission.decisions == found.decisions


def test_deciding_again_decides_the_same() -> None:
    world = FakeWorld(seen=[worker("a", {0: 0, 1: 0}), worker("b", {2: 0, 3: 0})])
    assert decide(case(), world) == decide(case(), world)


def test_every_choice_is_reserved() -> None:
    found, _ = decide(case(sampling=Sampling(n=3, max_tokens=10)), FakeWorld())
    assert admitted(found)[1].reserved_tokens == 2 + 3 * 10


# --- the grant -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply("tokens.other", 0), Reason.PERMISSION_DENIED),
        (Reply("lifecycle", 0), Reason.PERMISSION_DENIED),
        (Reply("tokens", 8), Reason.INVALID_GRANT),
        (Reply("tokens", -1), Reason.INVALID_GRANT),
        (Reply("tokens.acme", 1), Reason.INVALID_GRANT),
        (Reply("tokens", 0, "xml"), Reason.INVALID_GRANT),
    ],
)
def test_a_reply_that_may_not_be_written_reaches_nobody(reply: Reply, reason: Reason) -> None:
    refusal = reply_refusal(FakeGrant(reply=reply), FakeWorld())
    assert refusal is not None
    assert refusal == refused(case(grant=FakeGrant(reply=reply)))
    assert refusal.reason is reason


def test_a_reply_topic_that_does_not_exist_reaches_nobody() -> None:
    refusal = reply_refusal(FakeGrant(reply=Reply("tokens.acme", 0)), FakeWorld(topics={"tokens": 8}))
    assert refusal is not None
    assert refusal.reason is Reason.NOT_FOUND


def test_a_tenant_may_hear_on_its_own_topic_in_json() -> None:
    found, refusal = decide(case(grant=FakeGrant(reply=Reply("tokens.acme", 0, "json"))), FakeWorld())
    assert refusal is None
    assert admitted(found)[0].reply == Reply("tokens.acme", 0, "json")


@pytest.mark.parametrize(("expires_ms", "passes"), [(NOW + 1, True), (NOW, False), (NOW - 1, False)])
def test_expiry_is_judged_by_the_records_own_time(expires_ms: int, passes: bool) -> None:
    _, refusal = decide(case(grant=FakeGrant(expires_ms=expires_ms)), FakeWorld())
    assert (refusal is None) == passes
    assert refusal is None or refusal.reason is Reason.GRANT_EXPIRED


@pytest.mark.parametrize("revoked_ms", [NOW - 1, NOW, NOW + 1])
def test_a_revoked_key_is_refused_whenever_the_record_was_written(revoked_ms: int) -> None:
    world = FakeWorld()
    tenant = world.tenants["acme"]
    world.tenants["acme"] = replace(tenant, keys=(replace(tenant.keys[0], revoked_ms=revoked_ms),))
    own = FakeGrant(reply=Reply("tokens.acme", 0))
    assert refused(case(), world).reason is Reason.INVALID_API_KEY
    assert refused(case(grant=own), world).reason is Reason.INVALID_GRANT, "a direct producer knows of no key"
    world.tenants["acme"] = replace(tenant, disabled=True)
    assert refused(case(), world).reason is Reason.INVALID_API_KEY, "as its front door says"
    assert refused(case(grant=own), world).reason is Reason.PERMISSION_DENIED


def test_tenant_key_and_tier_must_be_in_force() -> None:
    world = FakeWorld()
    tenant = world.tenants["acme"]
    assert refused(case(grant=FakeGrant(tenant="nobody", reply=Reply("tokens", 0)))).reason is Reason.INVALID_GRANT
    assert refused(case(grant=FakeGrant(key_id="k2"))).reason is Reason.INVALID_GRANT
    assert refused(case(grant=FakeGrant(tiers=("batch",)))).reason is Reason.PERMISSION_DENIED
    narrow = replace(tenant, keys=(ApiKey("k1", "0" * 64, ("batch",), 0),))
    assert refused(case(), FakeWorld(tenants={"acme": narrow})).reason is Reason.PERMISSION_DENIED
    assert refused(case(), FakeWorld(tenants={"acme": replace(tenant, disabled=True)})).reason is Reason.INVALID_API_KEY


def test_who_may_not_ask_learns_nothing_of_the_request() -> None:
    """Authentication comes first: a bad field or an unknown model is not told to a stranger."""
    assert (
        refused(case(grant=FakeGrant(expires_ms=0), model="unknown", sampling=Sampling(n=99))).reason
        is Reason.GRANT_EXPIRED
    )


# --- the request -----------------------------------------------------------------------------------------------------


def test_a_field_at_fault_is_named() -> None:
    refusal = refused(case(sampling=Sampling(temperature=3.0)))
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "sampling.temperature")
    refusal = refused(case(sampling=Sampling(logit_bias={"257": 1.0})))
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "sampling.logit_bias.257")


def test_what_is_too_large_is_told_apart() -> None:
    refusal = refused(replace(case(messages=None, prompt="x" * 11), content_bytes_max=10))
    assert (refusal.reason, refusal.param) == (Reason.PAYLOAD_TOO_LARGE, "prompt")


def test_an_unknown_model_is_refused_and_tells_of_no_other() -> None:
    refusal = refused(case(model="other"))
    assert (refusal.reason, refusal.param) == (Reason.MODEL_NOT_FOUND, "model")
    assert "v1" not in refusal.message


def test_a_tier_that_the_version_does_not_serve_is_refused() -> None:
    world = FakeWorld()
    world.models["m"] = replace(world.models["m"], tiers=("batch",))
    assert refused(case(), world).reason is Reason.MODEL_NOT_FOUND


def test_a_model_without_its_topic_can_be_tried_again() -> None:
    refusal = refused(case(), FakeWorld(topics={"tokens": 8}))
    assert refusal.reason is Reason.UNAVAILABLE and refusal.reason.retriable


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "resolved"),
    [
        (99, None, 1),
        (100, None, None),
        (101, None, None),
        (1, 99, 99),
        (1, 100, None),
        (50, 50, 50),
        (50, 51, None),
        (1, 1 << 62, None),
    ],
)
def test_prompt_and_answer_fit_the_context(prompt: int, max_tokens: int | None, resolved: int | None) -> None:
    found, refusal = decide(case(sampling=Sampling(max_tokens=max_tokens)), FakeWorld(), prompt=(1,) * prompt)
    if resolved is None:
        assert refusal is not None
        assert (refusal.reason, refusal.param) == (Reason.CONTEXT_LENGTH_EXCEEDED, "messages")
        assert "maximum context length is 100 tokens" in refusal.message
        assert f"{prompt} in the messages" in refusal.message
    else:
        assert admitted(found)[0].sampling.max_tokens == resolved


def test_min_tokens_beyond_what_is_left_is_refused() -> None:
    assert refused(case(sampling=Sampling(min_tokens=99))).reason is Reason.CONTEXT_LENGTH_EXCEEDED
    found, refusal = decide(case(sampling=Sampling(min_tokens=98)), FakeWorld())
    assert refusal is None and found.max_tokens == 98


def test_a_prompt_without_tokens_is_refused() -> None:
    assert refused(case(), prompt=()).reason is Reason.INVALID_REQUEST


def test_the_deadline_counts_from_the_records_time() -> None:
    assert decide(case(timeout_ms=1), FakeWorld())[0].deadline_ms == NOW + 1
    assert decide(case(), FakeWorld())[0].deadline_ms == NOW + 5_000


# --- what a verdict becomes ------------------------------------------------------------------------------------------


def test_a_refusal_tells_why_and_where() -> None:
    found, refusal = decide(case(model="x" * 100), FakeWorld())
    assert refusal is not None
    event = rejected(found, refusal)
    assert (event.request_id, event.tenant, event.tier) == (ID, "acme", "interactive")
    assert event.reason == "model_not_found"
    assert event.requested_ms == NOW and event.source == found.source
    assert event.decisions[-1] == Decision("route", "refused", "model_not_found")


def test_a_refusal_quotes_no_more_than_a_little() -> None:
    found, refusal = refuse(case(), "tokenise", Refusal(Reason.INVALID_REQUEST, "x" * 100_000))
    assert refusal is not None
    assert len(rejected(found, refusal).message) <= 1_000


def test_a_cancel_names_the_tenant_to_readers_and_workers() -> None:
    ending, word = cancelled(InferenceCancelled(ID, tenant="somebody else"), FakeGrant(), "interactive")
    assert (ending.tenant, ending.reason, ending.source) == ("acme", "cancelled", "cancel")
    assert ending.attempt is None and not ending.if_not_started
    assert word == InferenceCancelled(ID, "acme")


def test_a_cancel_of_what_admission_doesnt_know_names_no_tier() -> None:
    ending, _ = cancelled(InferenceCancelled(ID), FakeGrant(), "")
    assert (ending.tier, ending.source) == ("", CANCEL)


@pytest.mark.parametrize(
    ("ended", "reason", "text"),
    [(yielded, "cancelled", YIELDED_TEXT), (revoked, "invalid_api_key", REVOKED_TEXT)],
)
def test_who_makes_way_or_has_lost_its_key_is_ended_and_told_why(ended: Any, reason: str, text: str) -> None:
    ending, word = ended(ID, "acme", "interactive")
    assert (ending.tenant, ending.tier, ending.reason, ending.source) == ("acme", "interactive", reason, "cancel")
    assert (ending.message, word) == (text, InferenceCancelled(ID, "acme"))


def test_an_admission_names_the_door_that_watches_the_request_but_no_invented_one() -> None:
    assert admitted(taking(FakeWorld(), case(door="0123456789ab")))[1].door == "0123456789ab"
    assert admitted(taking(FakeWorld(), case(door="d" * 17)))[1].door == ""


@given(
    st.integers(0, 200),
    st.none() | st.integers(1, 200),
    st.integers(0, 150),
    st.integers(1, 8),
    st.none() | st.integers(1, 10_000),
    st.lists(st.integers(-5, 300), max_size=3),
)
def test_what_is_admitted_fits(
    prompt: int, max_tokens: int | None, min_tokens: int, n: int, timeout_ms: int | None, stop_ids: list[int]
) -> None:
    sampling = Sampling(max_tokens=max_tokens, min_tokens=min_tokens, n=n, stop_token_ids=tuple(stop_ids))
    found, refusal = decide(case(sampling=sampling, timeout_ms=timeout_ms), FakeWorld(), prompt=(1,) * prompt)
    if refusal is not None:
        assert refusal.reason in (Reason.INVALID_REQUEST, Reason.CONTEXT_LENGTH_EXCEEDED)
        return
    scheduled, admission = admitted(found)
    assert scheduled.sampling.max_tokens is not None
    assert 1 <= scheduled.sampling.max_tokens <= 100 - prompt
    assert scheduled.sampling.min_tokens <= scheduled.sampling.max_tokens
    assert all(0 <= token_id < 257 for token_id in scheduled.sampling.stop_token_ids)
    assert admission.reserved_tokens == prompt + n * scheduled.sampling.max_tokens
    assert scheduled.deadline_ms > NOW
