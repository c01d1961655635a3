"""What of an event goes to the object store, and that it comes back as it was, or not at all."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import payloads
from schemas.codec import Codec, encode, encode_json
from schemas.errors import HeadraceError, Undecodable
from schemas.events import (
    Attempt,
    ChoiceAnswer,
    ChoiceEnd,
    GenerationStarted,
    InferenceAnswered,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceRequested,
    InferenceScheduled,
    Message,
    PayloadStored,
    Reply,
    Sampling,
    Tensor,
    Timings,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.payloads import (
    PayloadUnreadable,
    Stored,
    claim,
    key_of,
    may_be_large,
    outline_of,
    refusal,
    stand_in,
    whole,
)
from schemas.reasons import Reason
from schemas.topics import INLINE_MAX_BYTES, REQUEST_MAX_BYTES

RID = "0193b5c0-0000-7000-8000-000000000001"
OTHER = "0193b5c0-0000-7000-8000-000000000002"
WHERE = (RID, "acme", "m", "1", "interactive")
SECRET = "a secret of the prompt"
EVENTS: list[Stored] = [
    InferenceRequested(RID, "m", prompt=SECRET),
    InferenceRequested(RID, "m", messages=(Message("user", SECRET),), sampling=Sampling(max_tokens=3)),
    InferenceRequested(RID, "m", prompt_token_ids=(0, 1, 4_294_967_295)),
    InferenceScheduled(*WHERE, (5, 6, 7), Sampling(max_tokens=1), 9, 8, Reply("tokens", 1), "salt"),
    TokensGenerated(RID, 0, Attempt(1, 2), 3, (4, 5), SECRET, (TokenLogprob(4, SECRET.encode(), -0.5),)),
    InferenceCompleted(*WHERE, Attempt(1, 2), (ChoiceEnd(0, 5, "stop", None, SECRET),), Usage(1, 2), Timings(1, 2, 3), "w"),
    InferenceAnswered(*WHERE, (ChoiceAnswer(0, (1, 2), SECRET, "stop"),), Usage(1, 2)),
]  # fmt: skip
NAMES = [f"{type(event).__name__}{i}" for i, event in enumerate(EVENTS)]
EACH = pytest.mark.parametrize("event", EVENTS, ids=NAMES)


@EACH
@pytest.mark.parametrize("encoding", ["avro", "json"])
def test_what_is_claimed_comes_back(event: Stored, encoding: str) -> None:
    reference, content = claim(event, None, "acme", encoding)
    assert (reference.digest, reference.size_bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    assert (reference.request_id, reference.tenant, reference.event) == (RID, "acme", type(event).__name__)
    assert whole(reference, content, Codec()) == event
    for form in (encode, encode_json):
        assert whole(_again(form(reference)), content, Codec()) == event


def _again(value: bytes) -> PayloadStored:
    found = Codec().decode(value)
    assert isinstance(found, PayloadStored)
    return found


@EACH
def test_a_reference_tells_nothing_of_what_was_said(event: Stored) -> None:
    reference, _ = claim(event, None, "acme", "avro")
    assert SECRET.encode() not in encode(reference)
    assert key_of(reference) == f"payloads/acme/{reference.digest}"
    assert type(outline_of(reference)) is type(event)


@given(ids=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=300), step=st.integers(1, 100))
def test_token_ids_come_back_in_steps(ids: list[int], step: int) -> None:
    event = replace(_scheduled(), prompt_token_ids=tuple(ids))
    reference, content = claim(event, None, "acme", "avro")
    assert len(content) == len(RID) + 4 * len(ids)
    before, payloads.IDS_A_STEP = payloads.IDS_A_STEP, step
    try:
        assert whole(reference, content, Codec()) == event
    finally:
        payloads.IDS_A_STEP = before


def _scheduled() -> InferenceScheduled:
    found = EVENTS[3]
    assert isinstance(found, InferenceScheduled)
    return found


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_a_token_id_that_is_none_is_refused(token_id: int) -> None:
    with pytest.raises(HeadraceError) as caught:
        claim(InferenceRequested(RID, "m", prompt_token_ids=(token_id,)), None, "acme", "avro")
    assert caught.value.reason is Reason.INVALID_REQUEST


@EACH
@given(data=st.data())
def test_spoilt_content_is_undecodable_or_another_event_and_never_a_crash(event: Stored, data: st.DataObject) -> None:
    """The digest has been checked before; a caller's object may hold anything all the same."""
    reference, content = claim(event, None, "acme", "avro")
    spoilt = data.draw(st.one_of(st.binary(max_size=60), st.integers(0, len(content)).map(lambda n: content[:n])))
    try:
        assert isinstance(whole(reference, spoilt, Codec()), Stored)
    except Undecodable:
        pass


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (encode(InferenceRequested(OTHER, "m", prompt="x")), "another event"),
        (encode(InferenceCancelled(RID, "acme")), "another event"),
        (encode(PayloadStored(RID, "acme", "InferenceRequested", "0" * 64, 1)), "another event"),
        (encode_json(InferenceRequested(RID, "m", prompt="x"))[:-1], "not JSON"),
        (b"junk", "neither"),
        (b"", "no value"),
    ],
)
def test_an_object_that_holds_something_else_is_undecodable(content: bytes, why: str) -> None:
    reference, _ = claim(InferenceRequested(RID, "m", prompt="x"), None, "acme", "avro")
    with pytest.raises(Undecodable, match=why):
        whole(reference, content, Codec())


@pytest.mark.parametrize(
    "outline",
    [b"junk", encode(InferenceRequested(OTHER, "m")), encode(InferenceCancelled(RID)), encode(GenerationStarted(*WHERE, Attempt(1, 1), (0,), 1, "w"))],
)  # fmt: skip
def test_an_outline_of_something_else_is_refused(outline: bytes) -> None:
    event = InferenceRequested(RID, "m", prompt="x")
    reference, content = claim(event, None, "acme", "avro")
    with pytest.raises(Undecodable):
        whole(replace(reference, outline=outline), content, Codec())
    assert outline_of(replace(reference, outline=outline)) is None
    assert whole(replace(reference, outline=None), content, Codec()) == event


GOOD = PayloadStored(RID, "acme", "InferenceRequested", "a" * 64, 1000)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"size_bytes": REQUEST_MAX_BYTES + payloads.ENVELOPE_BYTES}, None),
        ({"size_bytes": REQUEST_MAX_BYTES + payloads.ENVELOPE_BYTES + 1}, Reason.PAYLOAD_TOO_LARGE),
        ({"size_bytes": 1 << 62}, Reason.PAYLOAD_TOO_LARGE),
        ({"size_bytes": 0}, Reason.INVALID_REQUEST),
        ({"size_bytes": -1}, Reason.INVALID_REQUEST),
        ({"tenant": "other"}, Reason.PERMISSION_DENIED),
        ({"tenant": "acme/../other"}, Reason.PERMISSION_DENIED),
        ({"event": "InferenceScheduled"}, Reason.INVALID_REQUEST),
        ({"digest": "A" * 64}, Reason.INVALID_REQUEST),
        ({"digest": "../" + "a" * 61}, Reason.INVALID_REQUEST),
        ({"digest": "a" * 64 + "\n"}, Reason.INVALID_REQUEST),
        ({"digest": ""}, Reason.INVALID_REQUEST),
        ({"request_id": "nobody"}, Reason.INVALID_REQUEST),
    ],
)
def test_which_references_of_callers_are_followed(changed: dict[str, Any], reason: Reason | None) -> None:
    found = refusal(replace(GOOD, **changed), "acme")
    assert (found and found.reason) == reason


def test_token_ids_may_take_four_bytes_for_two() -> None:
    reference, _ = claim(InferenceRequested(RID, "m", prompt_token_ids=(1,)), None, "acme", "avro")
    assert refusal(replace(reference, size_bytes=2 * REQUEST_MAX_BYTES), "acme") is None
    assert refusal(replace(reference, size_bytes=2 * REQUEST_MAX_BYTES + 100_000), "acme") is not None


@pytest.mark.parametrize("tenant", ["a/b", "..", "", "ä", "x" * 64])
def test_a_reference_names_a_place_of_its_tenants_own(tenant: str) -> None:
    with pytest.raises(Undecodable):
        key_of(replace(GOOD, tenant=tenant))


@EACH
@pytest.mark.parametrize("reason", [Reason.PAYLOAD_LOST, Reason.UNAVAILABLE])
def test_what_is_lost_of_a_stream_ends_it_as_failed(event: Stored, reason: Reason) -> None:
    reference, _ = claim(event, None, "acme", "avro")
    found = stand_in(PayloadUnreadable(reason, "gone", reference, outline_of(reference)))
    match event:
        case TokensGenerated() | InferenceCompleted():
            assert isinstance(found, InferenceFailed)
            assert (found.request_id, found.tenant, found.reason, found.attempt) == (
                RID,
                "acme",
                reason.value,
                event.attempt,
            )
            assert not found.totals
        case InferenceAnswered():
            assert found == replace(event, choices=(), error_reason=reason.value, error_message="gone")
        case _:
            assert found is None
    assert stand_in(PayloadUnreadable(reason, "gone", reference)) is None


def test_a_reference_is_known_by_its_first_bytes() -> None:
    assert payloads.is_reference(encode(GOOD))
    assert not any(map(payloads.is_reference, (None, b"", encode_json(GOOD), encode(_scheduled()))))


@pytest.mark.parametrize("what", ["prompt", "ids", "inputs", "names", "wishes"])
def test_what_may_be_too_large_for_a_record_is_told_before_it_is_encoded(what: str) -> None:
    """Whatever it is that is large, and never where the record is larger than was told."""
    count = INLINE_MAX_BYTES // 4
    tensors = tuple(Tensor(f"{'x' * 250}{i}", "UINT8", (1,), b"a") for i in range(250))
    large = {
        "prompt": InferenceRequested(RID, "m", prompt="𝄞" * count),
        "ids": InferenceRequested(RID, "m", prompt_token_ids=(1,) * count),
        "inputs": InferenceRequested(RID, "m", inputs=(Tensor("x", "UINT8", (4 * count,), bytes(4 * count)),)),
        "names": InferenceRequested(RID, "m", inputs=tensors, outputs=tuple("𝄞" * 250 + str(i) for i in range(600))),
        "wishes": InferenceRequested(
            RID, "m", inputs=tensors[:1], parameters={"𝄞" * 1_000 + str(i): "𝄞" * 1_000 for i in range(100)}
        ),
    }[what]
    assert may_be_large(large)
    assert not may_be_large(InferenceRequested(RID, "m", inputs=tensors[:3], outputs=("y",), parameters={"a": "b"}))
