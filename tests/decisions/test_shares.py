"""A group's partitions are shared evenly, topic by topic, and stay where they are if they can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decisions.shares import Member, Partition, share

BATCH, LIVE = "work.m.1.batch", "work.m.1.interactive"
BOTH = frozenset({BATCH, LIVE})


def all_of(topic: str, count: int) -> list[Partition]:
    return [(topic, number) for number in range(count)]


def rejoined(shares: dict[str, list[Partition]], generation: int) -> dict[str, Member]:
    return {name: Member(BOTH, frozenset(held), generation) for name, held in shares.items()}


def test_a_lone_member_gets_everything() -> None:
    assert share({BATCH: 2, LIVE: 2}, {"a": Member(BOTH)}) == {"a": all_of(BATCH, 2) + all_of(LIVE, 2)}


def test_a_second_member_gets_half_of_each_tier() -> None:
    first = rejoined(share({BATCH: 4, LIVE: 4}, {"a": Member(BOTH)}), 1)
    shares = share({BATCH: 4, LIVE: 4}, {**first, "b": Member(BOTH)})
    for held in shares.values():
        assert [topic for topic, _ in held] == [BATCH, BATCH, LIVE, LIVE]


def test_single_partitions_go_to_different_members() -> None:
    first = rejoined(share({BATCH: 1, LIVE: 1}, {"a": Member(BOTH)}), 1)
    assert share({BATCH: 1, LIVE: 1}, {**first, "b": Member(BOTH)}) == {"a": [(BATCH, 0)], "b": [(LIVE, 0)]}


def test_a_topic_that_nobody_reads_is_nobodys() -> None:
    assert share({BATCH: 2, LIVE: 2}, {"a": Member(frozenset({LIVE}))}) == {"a": all_of(LIVE, 2)}


def test_the_claim_of_the_higher_generation_counts() -> None:
    claim = frozenset({(LIVE, 0)})
    members = {"a": Member(BOTH, claim, 3), "b": Member(BOTH, claim, 2)}
    assert (LIVE, 0) in share({LIVE: 2}, members)["a"]


counts = st.fixed_dictionaries({BATCH: st.integers(0, 9), LIVE: st.integers(0, 9)})
groups = st.lists(st.sets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=5)


@given(counts, groups)
def test_every_partition_has_one_owner_and_shares_are_even(partitions: dict[str, int], steps: list[set[str]]) -> None:
    held: dict[str, list[Partition]] = {}
    for generation, names in enumerate(steps):
        members = {name: Member(BOTH, frozenset(held.get(name, ())), generation) for name in names}
        held = share(partitions, members)
        given_out = sorted(partition for shares in held.values() for partition in shares)
        assert given_out == sorted(all_of(BATCH, partitions[BATCH]) + all_of(LIVE, partitions[LIVE]))
        for topic in BOTH:
            of_topic = [sum(name == topic for name, _ in shares) for shares in held.values()]
            assert max(of_topic) - min(of_topic) <= 1
        totals = [len(shares) for shares in held.values()]
        assert max(totals) - min(totals) <= 1


@given(counts, st.sets(st.sampled_from("abcde"), min_size=1))
def test_the_same_members_keep_what_they_have(partitions: dict[str, int], names: set[str]) -> None:
    first = share(partitions, {name: Member(BOTH) for name in names})
    assert share(partitions, rejoined(first, 1)) == first


@given(counts, st.sets(st.sampled_from("abcde"), min_size=2), st.data())
def test_only_the_partitions_of_one_that_left_move_far(
    partitions: dict[str, int], names: set[str], data: st.DataObject
) -> None:
    before = share(partitions, {name: Member(BOTH) for name in names})
    gone = data.draw(st.sampled_from(sorted(names)))
    after = share(partitions, {name: member for name, member in rejoined(before, 1).items() if name != gone})
    moved = sum(partition not in before[name] for name, held in after.items() for partition in held)
    assert moved <= len(before[gone]) + len(BOTH) * len(after)
