"""A batch job's ids, gathering and memory."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions.jobs import (
    PARTS_MAX,
    RESERVED_BYTES,
    TRIES_MAX,
    UNITS_MAX,
    Done,
    Job,
    Part,
    Tries,
    Weight,
    form_of,
    gathered,
    merged,
    part_id,
    part_of,
    parted,
    prefix_of,
    reserved,
    shares,
    tag_of,
    unlike,
)
from schemas.ids import is_request_id, unix_ms
from schemas.parts import Tensor
from schemas.tensors import pack
from tests.small_models import small_versions

TIMES = st.integers(0, (1 << 48) - 1)
TAGS = st.binary(min_size=4, max_size=4)
PARTS = st.builds(Part, st.integers(0, UNITS_MAX - 1), st.integers(0, PARTS_MAX - 1), st.integers(0, TRIES_MAX - 1))


@given(TIMES, TAGS, PARTS)
def test_an_id_is_a_request_id_that_tells_its_part(created_ms: int, tag: bytes, part: Part) -> None:
    found = part_id(created_ms, tag, part)
    assert is_request_id(found)
    assert unix_ms(found) == created_ms
    assert part_of(found) == part
    assert found.startswith(prefix_of(created_ms, tag))


@given(TIMES, PARTS, PARTS)
def test_parts_have_different_ids_and_jobs_different_prefixes(created_ms: int, one: Part, other: Part) -> None:
    tag = tag_of(b"one")
    assert (part_id(created_ms, tag, one) == part_id(created_ms, tag, other)) == (one == other)
    assert prefix_of(created_ms, tag) != prefix_of(created_ms, tag_of(b"other"))


LINES = st.lists(
    st.builds(Weight, st.sampled_from([None, "a", "b"]), st.integers(1, 9), st.integers(0, 40)), max_size=40
)


@given(LINES, st.integers(1, 8), st.integers(1, 60))
def test_units_are_the_lines_in_order_of_one_kind_and_bounded(lines: list[Weight], rows: int, size: int) -> None:
    units = list(gathered(lines, lambda line: line, rows, size))
    assert [line for unit in units for line in unit] == lines
    for unit in units:
        assert len({line.kind for line in unit}) == 1
        if len(unit) > 1:
            assert unit[0].kind is not None
            assert sum(line.rows for line in unit) <= rows
            assert sum(line.size_bytes for line in unit) <= size


@given(LINES, st.integers(1, 8), st.integers(1, 60))
def test_a_unit_ends_only_where_it_must(lines: list[Weight], rows: int, size: int) -> None:
    units = list(gathered(lines, lambda line: line, rows, size))
    for unit, after in itertools.pairwise(units):
        both = [*unit, after[0]]
        assert (
            None in {line.kind for line in both}
            or len({line.kind for line in both}) > 1
            or sum(line.rows for line in both) > rows
            or sum(line.size_bytes for line in both) > size
        )


ROWS = st.lists(st.lists(st.binary(max_size=5), min_size=1, max_size=4), min_size=1, max_size=6)


@given(ROWS, st.integers(1, 3))
def test_what_was_merged_parts_again(lines: list[list[bytes]], width: int) -> None:
    each = [
        (
            Tensor("b", "BYTES", (len(rows),), pack(rows)),
            Tensor("f", "FP32", (len(rows), width), b"".join(row.ljust(4 * width, b"_")[: 4 * width] for row in rows)),
        )
        for rows in lines
    ]
    assert parted(merged(each), [len(rows) for rows in lines]) == each


def test_outputs_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows were asked"):
        parted([Tensor("f", "FP32", (2, 1), bytes(8))], [2, 1])
    with pytest.raises(ValueError, match="1 rows were asked"):
        parted([Tensor("f", "FP32", (), bytes(4))], [1])


@given(st.integers(0, 10_000), st.lists(st.integers(0, 1_000), min_size=1, max_size=64))
def test_shares_add_up(total: int, weights: list[int]) -> None:
    found = shares(total, weights)
    assert sum(found) == total
    assert min(found) >= 0
    if sum(weights):
        assert all(abs(part - total * weight / sum(weights)) < 1 for part, weight in zip(found, weights, strict=True))


@given(st.integers(0, 10**9))
def test_large_units_are_reserved_few_at_a_time(size: int) -> None:
    assert 8 <= reserved(size) <= 256
    assert reserved(size) == 8 or reserved(size) * size <= RESERVED_BYTES
    assert reserved(size) == 256 or (reserved(size) + 1) * size > RESERVED_BYTES


@given(st.permutations(list(range(30))), st.integers(0, 30))
def test_done_is_a_set_that_forgets_what_is_in_order(order: list[int], count: int) -> None:
    done = Done()
    for unit in order[:count]:
        done.add(unit)
        done.add(unit)
    assert {unit for unit in range(30) if unit in done} == set(order[:count])
    assert done.below not in done
    assert all(unit > done.below for unit in done.above)


def test_a_job_is_the_same_after_it_was_kept() -> None:
    job = Job(
        1_700_000_000_000,
        "seed",
        "digest",
        {"model": "m"},
        9,
        {"m": ("v1", "form")},
        100,
        {0: 7},
        5,
        tries={4 * 256 + 1: Tries(2, 1, 1), 3 * 256: Tries(1)},
        split={3},
    )
    job.written(1, 2, ["overloaded"])
    job.written(0, 1)
    job.written(3, 1)
    assert (job.units.below, job.units.above, job.split, job.done, job.failed) == (2, {3}, set(), 4, 1)
    assert (job.reasons, job.may_pass) == ({"overloaded": 1}, 1)
    assert job.part(4, 1).tries == 2
    assert job.part(3, 0).tries == job.part(4, 0).tries == 0
    job.try_again(job.part(4, 0))
    assert part_of(job.id_of(4, 0)) == Part(4, 0, 1)
    job.try_again(job.part(4, 1), failed=1)
    assert job.tries_of(4, 1) == Tries(3, 1, 2)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert not job.finished


def test_a_job_of_an_earlier_build_did_not_look_for_language_models() -> None:
    kept = Job(1, "seed", "digest", {}, 9).to_json()
    assert Job.from_json(kept).prompts
    del kept["prompts"]
    assert not Job.from_json({**kept, "version": 5}).prompts


def test_a_job_goes_on_with_the_versions_that_its_lines_were_checked_with() -> None:
    embed, classify, _ = small_versions("batch")
    versions = {(version.model, version.version): version for version in (embed, classify)}
    served = {embed.model: (embed.version, form_of(embed))}
    assert unlike({}, {}) is None
    assert unlike(served, versions) is None
    slower = replace(embed, slots=1, engine_args='{"a": 1}', created_ms=9)
    assert unlike(served, {(embed.model, embed.version): slower}) is None
    assert "is gone" in str(unlike(served, {}))
    for other in (
        replace(embed, processor=""),
        replace(embed, inputs=()),
        replace(embed, outputs=embed.inputs),
        replace(embed, batched=False),
    ):
        assert "takes or gives other things" in str(unlike(served, {(embed.model, embed.version): other}))


def test_a_job_belongs_to_its_tenant_and_its_log() -> None:
    job = Job(1, "seed", "digest", {}, 9)
    assert job.claim("acme", "") is None
    assert job.claim("acme", "one") is None
    assert "the tenant acme" in str(job.claim("other", "one"))
    assert "the Kafka cluster one" in str(job.claim("acme", "two"))
    assert job.claim("acme", "") is None
    kept = Job.from_json(json.loads(json.dumps(job.to_json())))
    assert (kept.tenant, kept.cluster) == ("acme", "one")


@pytest.mark.parametrize("kept", [{}, {"version": 1}, {"version": 2}, [], {"version": 2, "created_ms": 1}])
def test_what_is_no_job_is_refused(kept: Any) -> None:
    with pytest.raises(ValueError, match=r":|version"):
        Job.from_json(kept)
