from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.admission import AFTER_TOKENISING, BEFORE_TOKENISING, crowded, reply_refusal
from decisions.cases import Case, Refusal, judge, prepared, refuse, tokenised
from decisions.quota import EACH, ENDING_WAIT_MS, HELD_WAIT_MS
from decisions.signature import BATCH_MAX, text_tensors
from decisions.verdicts import CANCEL, REVOKED_TEXT, YIELDED_TEXT, admitted, cancelled, rejected, revoked, yielded
from schemas.events import (
    ApiKey,
    Decision,
    InferenceCancelled,
    ModelVersionRegistered,
    Position,
    Quota,
    Rate,
    Rates,
    Reply,
    Sampling,
    TenantChanged,
    Tensor,
    TensorSpec,
)
from schemas.reasons import Reason
from schemas.tensors import pack, texts
from schemas.topics import DEFAULTS
from tests.decisions.ledgers import quota
from tests.decisions.worlds import ID, NOW, WORK, FakeGrant, FakeWorld, case, worker

PROMPT = (104, 105)


def decide(
    given_case: Case, world: FakeWorld, prompt: tuple[int, ...] = PROMPT, vocab_size: int = 257
) -> tuple[Case, Refusal | None]:
    """What the shell does: one half of the list, the tokens, the other half."""
    found, refusal = judge(given_case, world, BEFORE_TOKENISING)
    if refusal is not None:
        return found, refusal
    return judge(tokenised(found, prompt, vocab_size), world, AFTER_TOKENISING)


def refused(given_case: Case, world: FakeWorld | None = None, **how: Any) -> Refusal:
    found, refusal = decide(given_case, world or FakeWorld(), **how)
    assert refusal is not None
    assert found.decisions[-1].outcome == "refused"
    assert found.decisions[-1].detail == refusal.reason.value
    return refusal


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


# --- the quota -------------------------------------------------------------------------------------------------------

PARTITION = 2
"""Of the requests, as `worlds.case` has it."""
ASKED = Sampling(max_tokens=10)
COST = len(PROMPT) + 10


def limited(*quotas: Quota, default: tuple[Quota, ...] = (), **state: Any) -> FakeWorld:
    """A world in which the tenant, and tenants without quotas of their own, have these limits."""
    world = FakeWorld(**state)
    world.tenants["acme"] = replace(world.tenants["acme"], quotas=quotas)
    world.tenants[DEFAULTS] = TenantChanged(DEFAULTS, "", (), 0, quotas=default)
    return world


def taking(world: FakeWorld, given_case: Case) -> Case:
    """Let a request in, and count it as the shell does."""
    found, refusal = decide(given_case, world)
    assert refusal is None
    assert found.reserved is not None
    world.used.setdefault((PARTITION, "acme"), {}).update(found.reserved.changed)
    return found


def test_without_limits_a_request_is_counted_all_the_same() -> None:
    found = taking(FakeWorld(), case(sampling=ASKED))
    assert not found.limited
    scheduled, admission = admitted(found)
    assert scheduled.rates is None
    assert (admission.scopes, admission.reserved_tokens) == (("",), COST)
    assert found.reserved is not None
    assert found.reserved.changed[""].held == COST
    assert found.decisions[-2] == Decision("quota", "passed", f"{COST} tokens reserved, no limits")


def test_what_has_room_is_let_in_and_told_what_is_left_after_it() -> None:
    world = limited(quota(tokens_per_minute=30, requests_per_minute=5), quota(EACH, "m", concurrent_requests=3))
    found = taking(world, case(sampling=ASKED))
    assert found.limited
    assert found.decisions[-2] == Decision("quota", "passed", f"{COST} tokens reserved, 3 limits")
    scheduled, admission = admitted(found)
    assert scheduled.rates == Rates(Rate(5, 4, 60_000), Rate(30, 30 - COST, 60_000))
    assert admission.scopes == ("", "key k1 model m")
    assert admission.reserved_tokens == COST


def test_what_has_no_room_is_refused_with_when_and_what_is_left() -> None:
    world = limited(quota(tokens_per_minute=30, requests_per_minute=5))
    taking(world, case(sampling=ASKED))
    lasting = FakeGrant(expires_ms=NOW + 60_000)
    taking(world, replace(case(sampling=ASKED, grant=lasting), requested_ms=NOW + 1))
    before = dict(world.used[PARTITION, "acme"])
    late = replace(case(sampling=ASKED, grant=lasting), requested_ms=NOW + 10_000)
    found, refusal = decide(late, world, prompt=PROMPT)
    assert refusal is not None
    assert refusal.reason is Reason.RATE_LIMITED
    assert refusal.retry_after_ms == 50_001, "both are in one second, and expire with its last"
    assert refusal.rates == Rates(Rate(5, 3, 50_001), Rate(30, 30 - 2 * COST, 50_001))
    event = rejected(found, refusal)
    assert (event.reason, event.retry_after_ms, event.rates) == ("rate_limited", 50_001, refusal.rates)
    assert event.decisions[-1] == Decision("quota", "refused", "rate_limited")
    assert world.used[PARTITION, "acme"] == before
    assert found.reserved is None


def test_what_never_has_room_is_told_no_time() -> None:
    refusal = refused(case(sampling=ASKED), limited(quota(tokens_per_day=COST - 1)))
    assert (refusal.reason, refusal.retry_after_ms) == (Reason.RATE_LIMITED, None)
    assert refusal.rates is not None and refusal.rates.tokens is not None
    assert refusal.rates.tokens.remaining == COST - 1


def test_a_tenant_without_quotas_keeps_the_default_ones_and_its_own_instead() -> None:
    tight = (quota(tokens_per_minute=COST - 1),)
    assert refused(case(sampling=ASKED), limited(default=tight)).reason is Reason.RATE_LIMITED
    assert not taking(limited(quota(tier="batch", concurrent_requests=1)), case(sampling=ASKED)).limited
    assert refused(case(sampling=ASKED), limited(quota(tier="batch"), default=tight)).reason is Reason.RATE_LIMITED
    assert taking(limited(quota(tokens_per_minute=COST), default=tight), case(sampling=ASKED)).limited
    assert not taking(limited(quota(), default=tight), case(sampling=ASKED)).limited


def test_quotas_of_another_tier_key_or_model_dont_limit() -> None:
    others = quota(tier="batch", tokens_per_day=1), quota("k2", tokens_per_day=1), quota(model="n", tokens_per_day=1)
    assert admitted(taking(limited(*others), case(sampling=ASKED)))[1].scopes == ("",)


def test_a_quota_counts_what_its_own_partition_and_tenant_have_used() -> None:
    world = limited(quota(concurrent_requests=1))
    taken = taking(world, case(sampling=ASKED))
    assert taken.reserved is not None
    world.used = {(PARTITION + 1, "acme"): taken.reserved.changed, (PARTITION, "other"): taken.reserved.changed}
    taking(world, case(sampling=ASKED))
    refusal = refused(case(sampling=ASKED), world)
    assert (refusal.retry_after_ms, refusal.rates) == (ENDING_WAIT_MS, Rates())


@pytest.mark.parametrize(
    ("service_ms", "retry_after_ms"),
    [(0.0, ENDING_WAIT_MS), (3_000.0, 3_000), (10.0, ENDING_WAIT_MS), (1e9, HELD_WAIT_MS)],
)
def test_who_asks_too_much_at_once_is_told_when_what_runs_may_have_ended(
    service_ms: float, retry_after_ms: int
) -> None:
    world = limited(quota(concurrent_requests=1))
    taking(world, case(sampling=ASKED))
    world.seen = [worker("a", {0: 0}, slots=1, service_ms=service_ms)]
    refusal = refused(case(sampling=ASKED), world)
    assert (refusal.retry_after_ms, refusal.ending) == (retry_after_ms, True)


def test_a_refused_request_is_told_how_many_must_end_before_and_after_it_is_tokenised() -> None:
    world = limited(quota(concurrent_requests=1, tokens_per_minute=2 * COST))
    assert crowded(taking(world, case(sampling=ASKED)), world) == {"": 1}
    before, _ = judge(case(sampling=ASKED), world, BEFORE_TOKENISING)
    assert crowded(before, world) == {"": 1}
    before, _ = judge(case(sampling=Sampling(max_tokens=2 * COST)), world, BEFORE_TOKENISING)
    assert crowded(before, world) == {}, "its tokens have no room either"


def test_every_choice_needs_room() -> None:
    world = limited(quota(tokens_per_minute=2 + 3 * 10))
    assert refused(case(sampling=Sampling(n=4, max_tokens=10)), world).reason is Reason.RATE_LIMITED
    found = taking(world, case(sampling=Sampling(n=3, max_tokens=10)))
    assert found.reserved is not None
    assert found.reserved.hold.cost.tokens == admitted(found)[1].reserved_tokens == 2 + 3 * 10


def test_max_tokens_left_out_reserves_all_that_is_left_of_the_context() -> None:
    assert refused(case(), limited(quota(tokens_per_minute=99))).reason is Reason.RATE_LIMITED
    assert admitted(taking(limited(quota(tokens_per_minute=100)), case()))[1].reserved_tokens == 100


def test_what_a_later_check_refuses_reserves_nothing() -> None:
    world = limited(quota(concurrent_requests=1), topics={"tokens": 8})
    for _ in range(2):
        found, refusal = decide(case(sampling=ASKED), world)
        assert refusal is not None
        assert (refusal.reason, found.decisions[-1].check) == (Reason.UNAVAILABLE, "place")
        assert found.decisions[-2].outcome == "passed"
        assert world.used == {}


def test_what_an_earlier_check_refuses_isnt_measured_by_limits() -> None:
    refusal = refused(case(sampling=Sampling(max_tokens=1_000)), limited(quota(tokens_per_minute=1)))
    assert refusal.reason is Reason.CONTEXT_LENGTH_EXCEEDED


# --- what a verdict becomes ------------------------------------------------------------------------------------------


# --- tensors, which a direct producer writes as it likes ---------------------------------------------------------------

VOCABULARY, CONTEXT = 30, 4
PAIRED = ModelVersionRegistered(
    "m",
    "v1",
    "onnx",
    "",
    CONTEXT,
    inputs=(TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "BYTES", (-1,))),
    outputs=(TensorSpec("y", "FP32", (-1, 2)),),
    batched=True,
)
TEXTS = replace(
    PAIRED,
    processor="text-embedding",
    inputs=(
        TensorSpec("text", "BYTES", (-1,)),
        TensorSpec("token_ids", "INT32", (-1,)),
        TensorSpec("lengths", "INT32", (-1,)),
    ),
    batched=False,
)
FOURS = replace(TEXTS, fixed_rows=4)
FILES = replace(PAIRED, processor="bytes-classification", inputs=(TensorSpec("bytes", "BYTES", (-1,)),), batched=False)
CHAT = FakeWorld().models["m"]
A, B = Tensor("a", "FP32", (2, 2), bytes(16)), texts("b", ["ä", "b"])
NO_TEXT = pack([b"a", b"\xff"])


def tensors_decided(
    version: ModelVersionRegistered, inputs: tuple[Tensor, ...], read: tuple[Tensor, ...] | None = None, **changes: Any
) -> tuple[Case, Refusal | None]:
    """What the shell does with tensors: between the halves of the list `read` is what the tokenizer makes of texts."""
    world = FakeWorld(models={"m": version})
    found, refusal = judge(case(messages=None, inputs=inputs, **changes), world, BEFORE_TOKENISING)
    if refusal is not None:
        return found, refusal
    return judge(prepared(found, inputs if read is None else read, VOCABULARY), world, AFTER_TOKENISING)


@pytest.mark.parametrize(
    ("version", "inputs", "read"),
    [
        (PAIRED, (B, A), None),
        (TEXTS, text_tensors([[0, 29], [1] * CONTEXT]), None),
        (TEXTS, (texts("text", ["ä"]),), text_tensors([[1, 2]])),
        (FOURS, text_tensors([[1]] * 8), None),
        (FILES, (Tensor("bytes", "BYTES", (2,), NO_TEXT),), None),
    ],
)
def test_tensors_that_fit_are_admitted_as_the_worker_reads_them(
    version: ModelVersionRegistered, inputs: tuple[Tensor, ...], read: tuple[Tensor, ...] | None
) -> None:
    found, refusal = tensors_decided(version, inputs, read)
    assert refusal is None
    assert [decision.check for decision in found.decisions][3:8] == [
        "route",
        "signature",
        "tokenise",
        "vocabulary",
        "context",
    ]
    assert admitted(found)[0].inputs == (inputs if read is None else read)


@pytest.mark.parametrize(
    ("version", "inputs", "param", "words"),
    [
        (PAIRED, (A, replace(B, name="c")), "inputs[1].name", "no input `c`; it has a, b"),
        (PAIRED, (A,), "inputs", "the input `b` is missing"),
        (PAIRED, (replace(A, datatype="INT32"), B), "inputs[0]", "`a`: the model takes FP32, not INT32"),
        (PAIRED, (A, Tensor("b", "UINT8", (2,), bytes(2))), "inputs[1]", "`b`: the model takes BYTES, not UINT8"),
        (PAIRED, (replace(A, shape=(4, 1)), B), "inputs[0]", "`a`: the model takes the shape [-1, 2], not [4, 1]"),
        (PAIRED, (replace(A, shape=(4,)), B), "inputs[0]", "`a`: the model takes the shape [-1, 2], not [4]"),
        (PAIRED, (replace(A, shape=(1, 2), data=bytes(8)), B), "inputs", "from 1 to 2: `a` 1, `b` 2"),
        (PAIRED, (A, replace(B, data=NO_TEXT)), "inputs[1]", "`b`: element 1 isn't UTF-8 text"),
        (TEXTS, (Tensor("text", "BYTES", (2,), NO_TEXT),), "inputs[0]", "`text`: element 1 isn't UTF-8 text"),
        (TEXTS, (texts("text", []),), "inputs", "0 items are given"),
        (TEXTS, (texts("text", ["a"] * (BATCH_MAX + 1)),), "inputs", "items are given; from 1 to"),
        (TEXTS, text_tensors([[1], []]), "inputs", "must be at least 1 each"),
        (FOURS, text_tensors([[1]] * 3), "inputs", "4 items at a time, and 3 are given"),
        (FILES, (texts("text", ["a"]),), "inputs[0].name", "no input `text`; it has bytes"),
        (CHAT, (A,), "inputs", "takes messages or a prompt, not tensors"),
    ],
)
def test_tensors_that_the_version_does_not_take_are_refused_before_their_texts_are_read(
    version: ModelVersionRegistered, inputs: tuple[Tensor, ...], param: str, words: str
) -> None:
    found, refusal = tensors_decided(version, inputs)
    assert refusal is not None
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, param)
    assert words in refusal.message
    assert (found.decisions[-1].check, found.decisions[-1].outcome) == ("signature", "refused")


@pytest.mark.parametrize("inputs", [(), (replace(A, data=bytes(12)), B), (A, replace(B, data=b"\xff\0\0\0a")), (A, A)])
def test_tensors_that_no_version_takes_are_refused_whatever_the_model(inputs: tuple[Tensor, ...]) -> None:
    found, refusal = tensors_decided(PAIRED, inputs)
    assert refusal is not None
    assert refusal.reason is Reason.INVALID_REQUEST
    assert found.decisions[-1].check == "validation"


def test_an_output_or_a_wish_that_the_version_does_not_have_is_refused() -> None:
    for changes, param in (
        ({"outputs": ("z",)}, "outputs[0].name"),
        ({"parameters": {"dimensions": "0"}}, "parameters.dimensions"),
    ):
        _, refusal = tensors_decided(TEXTS, text_tensors([[1]]), **changes)
        assert refusal is not None
        assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, param)


def test_a_tensor_model_takes_no_prompt() -> None:
    refusal = refused(case(), FakeWorld(models={"m": PAIRED}))
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "model")
    assert "takes tensors (a, b), not a prompt" in refusal.message


@pytest.mark.parametrize("unknown", [VOCABULARY, -1, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_refused_by_its_id(unknown: int) -> None:
    found, refusal = tensors_decided(TEXTS, text_tensors([[1, 2], [3, unknown]]))
    assert refusal is not None
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "inputs")
    assert refusal.message == f"the model has no token {unknown}; its ids run from 0 to 29"
    assert found.decisions[-1].check == "vocabulary"


@pytest.mark.parametrize(
    ("lengths", "reason", "words"),
    [
        ((2, 0), Reason.INVALID_REQUEST, "the text at 1 has no tokens"),
        ((1, 2, CONTEXT + 1), Reason.CONTEXT_LENGTH_EXCEEDED, "length is 4 tokens, and the text at 2 has 5"),
    ],
)
def test_a_text_must_have_tokens_and_fit_the_context(lengths: tuple[int, ...], reason: Reason, words: str) -> None:
    given = texts("text", ["a"] * len(lengths))
    found, refusal = tensors_decided(TEXTS, (given,), text_tensors([[1] * length for length in lengths]))
    assert refusal is not None
    assert (refusal.reason, refusal.param) == (reason, "inputs")
    assert words in refusal.message
    assert found.decisions[-1].check == "context"


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
