"""Request ids are UUIDv7 and sort by time; topics' names read back in one way; reasons are a closed list."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import ids, topics
from schemas.errors import HeadraceError
from schemas.reasons import Reason, lookup

TIMES = st.integers(0, (1 << 48) - 1)
RANDOM = st.binary(min_size=10, max_size=10)


@given(TIMES, RANDOM)
def test_an_id_is_a_uuid_of_version_7_and_tells_its_time(unix_ms: int, random: bytes) -> None:
    text = ids.request_id(unix_ms, random)
    parsed = uuid.UUID(text)
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert ids.is_request_id(text)
    assert ids.unix_ms(text) == unix_ms


@given(TIMES, TIMES, RANDOM, RANDOM)
def test_ids_sort_by_time(a: int, b: int, x: bytes, y: bytes) -> None:
    if a < b:
        assert ids.request_id(a, x) < ids.request_id(b, y)


@pytest.mark.parametrize("text", ["", "x", str(uuid.UUID(int=0)), "{0190}", "0190f5e6-3b1c-4c3f-8a7e-111111111111"])
def test_other_texts_are_no_ids(text: str) -> None:
    assert not ids.is_request_id(text)


@pytest.mark.parametrize("version", ["1.0", "", "a b", "-x", "x" * 64])
def test_a_version_that_would_blur_a_topics_name_is_refused(version: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        topics.work_topic("a.b", version, topics.BATCH)
    assert caught.value.param == "version"


def test_work_topics_read_back_in_one_way() -> None:
    assert topics.work_topic("a.b", "1", topics.BATCH).rsplit(".", 2) == ["work.a.b", "1", "batch"]


def test_topics_that_share_tables_have_the_same_partition_count() -> None:
    specs = {spec.name: spec for spec in topics.core_topics(topics.PartitionCounts(requests=7))}
    assert {
        specs[name].partitions for name in ("requests.interactive", "requests.batch", "requests.shadow", "lifecycle")
    } == {7}


def test_a_log_keeps_its_partition_counts_unless_others_are_named() -> None:
    there = {"lifecycle": 16, "requests.batch": 16, "answers": 5, "work.m.1.batch": 3}
    assert topics.PartitionCounts.of({}, {}) == topics.PartitionCounts()
    assert topics.PartitionCounts.of(there, {}) == topics.PartitionCounts(16, 8, 5)
    assert topics.PartitionCounts.of(there, {"requests": 2, "tokens": 9}) == topics.PartitionCounts(2, 9, 5)


def test_every_reason_has_a_meaning_and_reads_back() -> None:
    for reason in Reason:
        assert lookup(reason.value) is reason
        assert 400 <= reason.http_status < 600
        assert reason.text.endswith(".")
        assert reason.grpc_code.isupper()
        assert isinstance(reason.retriable, bool)
        assert reason.openai_type
    assert lookup("of a newer version") is Reason.INTERNAL_ERROR
