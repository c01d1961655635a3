"""What belongs in which topic, which letters are one, and what can be asked again, under which id, in which tier, and for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.dead_letters import (
    BELONGING,
    ELSEWHERE,
    Letters,
    askable,
    asked_again,
    followed,
    misplaced,
    tenant_of,
    tier_of,
)
from schemas.codec import published
from schemas.errors import HeadraceError
from schemas.events import (
    EVENT_TYPES,
    Event,
    FrontDoorSeen,
    InferenceCancelled,
    InferenceRequested,
    InferenceScheduled,
    Keyed,
    Message,
    ModelPromoted,
    PayloadStored,
    RecordDeadLettered,
    Reply,
    RequestKeyed,
    Sampling,
    SchemaPublished,
    TenantChanged,
)
from schemas.ids import request_id
from schemas.payloads import claim
from schemas.topics import (
    ANSWERS,
    CONTROL,
    DOORS,
    LIFECYCLE,
    REGISTRY,
    REQUEST_MAX_BYTES,
    SCHEMAS,
    TENANTS,
    TOKENS,
    WORKERS,
    core_topics,
    idempotency_topic,
    ledger_topic,
    requests_topic,
)

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


# --- what belongs where -------------------------------------------------------------------------------------------------


def test_every_topic_has_one_who_puts_its_records_aside() -> None:
    topics = {spec.name for spec in core_topics()}
    assert BELONGING.keys() | ELSEWHERE.keys() == topics
    assert not BELONGING.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("topic", "event"),
    [
        (TENANTS, TenantChanged("acme", "salt", (), 0)),
        (REGISTRY, ModelPromoted("m", "1")),
        (CONTROL, InferenceCancelled("r", "acme")),
        (DOORS, FrontDoorSeen("a")),
        (idempotency_topic("batch"), RequestKeyed("acme", "batch", Keyed("k", "f"), "r", Reply(TOKENS, 0), "m", 0)),
        (SCHEMAS, published(InferenceCancelled)),
    ],
)
def test_an_event_belongs_in_its_topic_and_in_no_other(topic: str, event: Event) -> None:
    assert misplaced(topic, b"k", event) is None
    for other in BELONGING.keys() - {topic}:
        if type(event) not in BELONGING[other]:
            assert type(event).__name__ in str(misplaced(other, b"k", event))


def test_only_a_compacted_topic_has_records_without_a_value_and_their_keys_are_text() -> None:
    for topic in (TENANTS, WORKERS, SCHEMAS, ledger_topic("batch")):
        assert misplaced(topic, b"a name", None) is None
        assert misplaced(topic, b"\xff\xfe", None) is not None
    for topic in (REGISTRY, DOORS, CONTROL, LIFECYCLE, ANSWERS, idempotency_topic("batch")):
        assert misplaced(topic, b"a name", None) == "the record has no value"


@pytest.mark.parametrize("topic", BELONGING)
def test_any_event_on_any_topic_is_judged_by_its_type(topic: str) -> None:
    for kind in set(EVENT_TYPES) - {PayloadStored, SchemaPublished}:  # which are looked into
        assert (kind in BELONGING[topic]) == (misplaced(topic, b"k", object.__new__(kind)) is None)


def test_an_answer_by_reference_belongs_in_answers() -> None:
    assert misplaced(ANSWERS, b"r", reference("InferenceAnswered")) is None
    assert misplaced(ANSWERS, b"r", reference("InferenceRequested")) is not None
    assert misplaced(LIFECYCLE, b"r", reference("InferenceAnswered")) is not None


def test_a_schema_that_cannot_be_used_does_not_belong_and_a_newer_versions_does() -> None:
    good = published(InferenceCancelled)
    assert misplaced(SCHEMAS, b"f", replace(good, schema="{")) is not None
    assert misplaced(SCHEMAS, b"f", replace(good, schema='"string"')) is not None
    assert misplaced(SCHEMAS, b"f", replace(good, name="NotInventedYet", schema="{}")) is None


# --- which letters are one ----------------------------------------------------------------------------------------------


def letter(offset: int = 7, timestamp_ms: int = 1, reason: str = "undecodable") -> RecordDeadLettered:
    return RecordDeadLettered(TENANTS, 0, offset, timestamp_ms, b"k", b"junk", {}, reason, "why", "lifecycle")


def test_a_record_put_aside_again_is_the_same_letter() -> None:
    letters = Letters()
    assert letters.hear(3, letter())
    assert not letters.hear(5, letter(reason="internal_error")), "by another, or by the same after a crash"
    assert letters.hear(6, letter(offset=8))
    assert [letters.number(number) for number in (3, 5, 6)] == [3, 3, 6]


def test_another_record_at_the_place_is_another_letter() -> None:
    """The topic was deleted and made again."""
    letters = Letters()
    assert letters.hear(3, letter())
    assert letters.hear(5, letter(timestamp_ms=2))


@given(st.lists(st.integers(0, 5), max_size=30))
def test_there_is_one_letter_for_each_record_however_often_it_is_put_aside(offsets: list[int]) -> None:
    letters = Letters()
    new = [number for number, offset in enumerate(offsets) if letters.hear(number, letter(offset))]
    assert [offsets[number] for number in new] == list(dict.fromkeys(offsets))
    for number, offset in enumerate(offsets):
        assert letters.number(number) == offsets.index(offset)


# --- what can be asked again, by its topic ------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", [requests_topic("batch"), "work.m.1.batch", TOKENS, "tokens.acme"])
def test_what_is_on_the_way_of_requests_may_be_asked_again(topic: str) -> None:
    askable(topic)


@pytest.mark.parametrize("topic", BELONGING)
def test_of_other_topics_nothing_is_written_again_and_it_is_said_what_to_do(topic: str) -> None:
    with pytest.raises(HeadraceError, match="drop the letter") as refused:
        askable(topic)
    assert topic in refused.value.message
    assert not refused.value.retriable


def test_each_kind_of_topic_has_advice_of_its_own() -> None:
    for topic, words in ((TENANTS, "headrace tenants"), (REGISTRY, "headrace models"), (LIFECYCLE, "counted twice")):
        with pytest.raises(HeadraceError, match=words):
            askable(topic)
