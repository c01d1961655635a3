"""What counts as the same request, and what is remembered of it, in whatever order and however often it is told."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions import idempotency as rules
from decisions.accounts import Accounts
from decisions.idempotency import KEYS_MAX, NOT_COUNTED, KeyIndex, KeyStanding, conflict, fingerprint, keyed
from decisions.validation import KEY_CHARS_MAX, problem
from schemas.codec import Codec, encode, encode_json
from schemas.events import (
    InferenceAdmitted,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    Message,
    Position,
    RequestKeyed,
    Sampling,
)
from schemas.parts import Keyed, Reply, Tensor
from schemas.topics import BATCH, INTERACTIVE, KEY_KEPT_MS, TOKENS, requests_topic
from tests.decisions.ledgers import Asked, admitted
from tests.decisions.worlds import ID, NOW

OWN = Reply("tokens.acme", 0)
DOOR = Reply(TOKENS, 3)
CHAT = InferenceRequested(
    ID, "m", messages=(Message("user", "hi"),), sampling=Sampling(max_tokens=5), idempotency_key="k"
)
OTHER_ID = "01900000-0000-7000-8000-000000000001"
CHANGES: dict[str, Any] = {
    "model": "other",
    "messages": (Message("user", "ho"),),
    "prompt": "x",
    "prompt_token_ids": (1,),
    "sampling": Sampling(max_tokens=6),
    "user": "u",
    "call": "c",
    "inputs": (Tensor("x", "UINT8", (1,), b"a"),),
    "outputs": ("y",),
    "parameters": {"top_k": "1"},
}
K = Keyed("key", "asked")
R = RequestKeyed("acme", INTERACTIVE, K, "r", DOOR, "m", NOW)


# --- the same request ------------------------------------------------------------------------------------------------


def test_who_asks_how_it_is_shown_and_how_long_is_waited_may_differ() -> None:
    again = replace(CHAT, request_id=OTHER_ID, stream=False, timeout_ms=5, door="another")
    assert keyed(again, DOOR) == keyed(CHAT, DOOR)


def test_every_other_field_counts() -> None:
    fields = {item.name for item in dataclasses.fields(InferenceRequested)}
    assert fields == CHANGES.keys() | NOT_COUNTED, "a new field: say what it changes, or why it doesn't count"
    found = {fingerprint(replace(CHAT, **{name: value})) for name, value in CHANGES.items()}
    assert len(found | {fingerprint(CHAT)}) == len(CHANGES) + 1


@pytest.mark.parametrize("item", [item for item in dataclasses.fields(Sampling) if item.name != "max_tokens"])
def test_every_way_to_sample_counts(item: dataclasses.Field[Any]) -> None:
    value: Any = {"stop": ("x",), "stop_token_ids": (3,), "logit_bias": {"4": 1.0}, "seed": 0, "logprobs": 0}.get(
        item.name
    )
    if value is None:
        value = not item.default if isinstance(item.default, bool) else item.default + 1  # type: ignore[operator]
    assert fingerprint(replace(CHAT, sampling=replace(CHAT.sampling, **{item.name: value}))) != fingerprint(CHAT)


def test_it_is_the_same_in_json_and_avro_and_with_a_default_spelt_out() -> None:
    given_ = replace(CHAT, sampling=Sampling(temperature=1.0, logit_bias={"1": 2.0, "3": 4.0}))
    assert fingerprint(Codec().decode(encode(given_))) == fingerprint(given_)  # type: ignore[arg-type]
    written = (
        encode_json(given_)
        .replace(b'"temperature":1.0', b'"temperature":1')
        .replace(b'{"1":2.0,"3":4.0}', b'{"3":4,"1":2}')
    )
    assert fingerprint(Codec().decode(written)) == fingerprint(given_)  # type: ignore[arg-type]


def test_without_a_key_only_who_makes_his_own_ids_is_known_by_the_id() -> None:
    plain = replace(CHAT, idempotency_key="")
    assert keyed(plain, DOOR) is None
    first, again, other = (keyed(replace(plain, request_id=name), OWN) for name in (ID, ID, OTHER_ID))
    assert first == again is not None
    assert other is not None and first is not None and other.key != first.key and other.fingerprint == first.fingerprint


def test_a_key_that_looks_like_an_id_is_none() -> None:
    by_key, by_id = keyed(replace(CHAT, idempotency_key=ID), OWN), keyed(replace(CHAT, idempotency_key=""), OWN)
    assert by_key is not None and by_id is not None
    assert by_key.key != by_id.key


@pytest.mark.parametrize("key", ["x" * (KEY_CHARS_MAX + 1), "é", "a\nb", "\x7f", "\t"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    found = problem(replace(CHAT, idempotency_key=key), 1_000)
    assert found is not None and found.param == "idempotency_key" and "255 printable" in found.message


@pytest.mark.parametrize("key", ["", "x", "x" * KEY_CHARS_MAX, '"8e03978e-40d5-43dd-bc93-6894a57f9324"', "a b~!"])
def test_a_key_may_be_any_printable_text(key: str) -> None:
    assert problem(replace(CHAT, idempotency_key=key), 1_000) is None


def test_a_conflict_names_what_is_to_be_changed() -> None:
    assert conflict(CHAT)[1] == "idempotency_key"
    assert conflict(replace(CHAT, idempotency_key=""))[1] == "request_id"


# --- what is remembered ----------------------------------------------------------------------------------------------


def heard(*records: RequestKeyed) -> KeyIndex:
    index = KeyIndex(INTERACTIVE)
    for record in records:
        index.hear(record)
    return index


def standing(index: KeyIndex, tenant: str = "acme", asked: Keyed = K, at: int = 0) -> tuple[KeyStanding, str | None]:
    found, first = index.standing(tenant, asked, NOW + at)
    return found, first.request_id if first is not None else None


NEW = KeyStanding.NEW, None


def test_the_same_under_one_key_is_a_repeat_and_something_else_a_conflict() -> None:
    index = heard(R)
    assert standing(index) == (KeyStanding.REPEAT, "r")
    assert standing(index, asked=Keyed("key", "else")) == (KeyStanding.CONFLICT, "r")
    assert standing(index, asked=Keyed("another", "asked")) == NEW


def test_a_key_is_one_tenants_and_one_tiers() -> None:
    assert standing(heard(R), tenant="other") == NEW
    assert standing(heard(replace(R, tier=BATCH))) == NEW


def test_a_key_is_remembered_for_a_day_from_when_it_was_asked() -> None:
    index = heard(R)
    assert standing(index, at=KEY_KEPT_MS - 1) == (KeyStanding.REPEAT, "r")
    assert standing(index, at=KEY_KEPT_MS) == NEW
    index.hear(replace(R, request_id="s", requested_ms=NOW + KEY_KEPT_MS))
    assert standing(index, at=KEY_KEPT_MS) == (KeyStanding.REPEAT, "s")


def test_days_that_are_over_are_forgotten_and_of_too_many_the_oldest() -> None:
    old = [replace(R, keyed=Keyed(f"k{i}", "x"), request_id=f"r{i}") for i in range(10)]
    index = heard(*old)
    for i in range(10):
        index.hear(replace(R, keyed=Keyed(f"n{i}", "x"), request_id=f"n{i}", requested_ms=NOW + KEY_KEPT_MS))
    assert len(index) == 10
    with mock.patch.object(rules, "KEYS_MAX", 3):
        index = heard(*old)
    assert [first.request_id for first in index.firsts().values()] == ["r7", "r8", "r9"]
    assert KEYS_MAX >= 100_000


@pytest.mark.parametrize(
    "reason", ["worker_lost", "deadline_exceeded", "cancelled", "invalid_api_key", "internal_error"]
)
def test_what_failed_and_may_succeed_another_time_frees_its_key(reason: str) -> None:
    index = heard(R)
    index.failed("acme", "r", reason)
    assert standing(index) == NEW
    (freed,) = index.take_unsaved()
    assert freed == replace(R, free=True)
    assert not index.take_unsaved()
    index.unsaved([freed])
    assert index.take_unsaved() == [freed]
    index.hear(R)  # told late
    assert standing(index) == NEW
    index.hear(replace(R, request_id="s", requested_ms=NOW + 5))
    assert standing(index) == (KeyStanding.REPEAT, "s")


@pytest.mark.parametrize("reason", ["engine_error", "poisoned", "answer_too_large"])
def test_what_would_fail_again_keeps_it(reason: str) -> None:
    index = heard(R)
    index.failed("acme", "r", reason)
    assert standing(index) == (KeyStanding.REPEAT, "r")


def test_an_id_is_never_free_for_its_stream_is_closed() -> None:
    known = keyed(replace(CHAT, idempotency_key=""), OWN)
    assert known is not None
    index = heard(replace(R, keyed=known, request_id=ID))
    index.failed("acme", ID, "cancelled")
    assert standing(index, asked=known) == (KeyStanding.REPEAT, ID)


def test_a_failure_of_another_tenants_request_with_the_same_id_frees_nothing() -> None:
    index = heard(R)
    index.failed("other", "r", "cancelled")
    assert standing(index) == (KeyStanding.REPEAT, "r")


# --- the fold --------------------------------------------------------------------------------------------------------

HISTORIES = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(1, KEY_KEPT_MS), st.booleans()), max_size=20
)
"""Requests in the order in which they come: tenant, key, milliseconds since the one before, and whether it fails if it is let in."""


def history(asks: list[tuple[str, str, int, bool]]) -> tuple[list[RequestKeyed], int]:
    """What is written when each is decided by what was written before, and when the last was asked."""
    owner, written, at = KeyIndex(INTERACTIVE), [], 0
    for number, (tenant, key, gap_ms, fails) in enumerate(asks):
        at += gap_ms
        record = RequestKeyed(tenant, INTERACTIVE, Keyed(key, f"{number}"), f"r{number}", DOOR, "m", NOW + at)
        if owner.standing(tenant, record.keyed, NOW + at)[0] is KeyStanding.NEW:
            owner.hear(record)
            written.append(record)
            if fails:
                owner.failed(tenant, record.request_id, "worker_lost")
                written += owner.take_unsaved()
    return written, at


@given(HISTORIES, st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_tell_the_same(asks: list[tuple[str, str, int, bool]], random: Any) -> None:
    written, at = history(asks)
    again = [*written, *random.choices(written, k=5)] if written else []
    random.shuffle(again)
    for tenant in "ab":
        for key in "xyz":
            found = standing(heard(*again), tenant, Keyed(key, ""), at)
            assert found == standing(heard(*written), tenant, Keyed(key, ""), at)


@given(HISTORIES)
def test_one_request_of_a_key_is_let_in_a_day_unless_it_fails(asks: list[tuple[str, str, int, bool]]) -> None:
    written, _ = history(asks)
    freed = {record.request_id for record in written if record.free}
    stands: dict[tuple[str, str], int] = {}
    for record in written:
        key = record.tenant, record.keyed.key
        if not record.free:
            assert record.requested_ms - stands.get(key, 0) >= KEY_KEPT_MS
            if record.request_id not in freed:
                stands[key] = record.requested_ms


# --- as lifecycle tells it -------------------------------------------------------------------------------------------

ASKED = Asked(NOW, "r", 80, "k1")


def let_in(**changes: Any) -> InferenceAdmitted:
    return replace(admitted(ASKED), keyed=K, **changes)


def told(*events: Any, at_ms: int = NOW) -> Accounts:
    accounts = Accounts(INTERACTIVE)
    for offset, event in enumerate(events):
        accounts.apply(offset, at_ms, event)
    return accounts


def test_an_admission_tells_its_key_unless_it_is_void_or_has_none() -> None:
    assert standing(told(let_in()).keys) == (KeyStanding.REPEAT, "r")
    assert standing(told(let_in(valid_until_ms=NOW - 1)).keys) == NEW
    assert not len(told(admitted(ASKED)).keys)


def test_what_is_refused_after_all_and_what_fails_frees_it() -> None:
    first = let_in()
    refused = InferenceRejected("r", "acme", "m", INTERACTIVE, "unavailable", "", source=first.source)
    elsewhere = replace(refused, source=Position(requests_topic(INTERACTIVE), first.source.partition, 99))
    for late in (refused, elsewhere):
        assert standing(told(first, late).keys) == standing(told(late, first).keys) == (KeyStanding.REPEAT, "r")
    after_all = InferenceFailed("r", "acme", "m", "", INTERACTIVE, "model_not_found", "", source="admission")
    for events in ((first, refused, after_all), (refused, first, after_all), (after_all, first)):
        assert standing(told(*events).keys) == NEW
    failed = InferenceFailed("r", "acme", "m", "v1", INTERACTIVE, "worker_lost", "")
    assert standing(told(first, failed).keys) == NEW
    assert standing(told(failed, first).keys) == NEW
    assert standing(told(first, replace(failed, reason="engine_error")).keys) == (KeyStanding.REPEAT, "r")
    assert standing(told(first, replace(failed, tier=BATCH)).keys) == (KeyStanding.REPEAT, "r")
