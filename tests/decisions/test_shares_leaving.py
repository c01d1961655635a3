"""Who is about to leave begins nothing: it gets no partitions that another could serve, and keeps those where its answers end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decisions.shares import Member, Partition, share
from tests.decisions.test_shares import BATCH, BOTH, LIVE, all_of, counts


def test_what_one_leaves_goes_to_who_stays() -> None:
    members = {
        "busy": Member(BOTH, frozenset({(LIVE, 0)}), 4, leaving=True),
        "stays": Member(BOTH, frozenset({(LIVE, 1)}), 4),
    }
    assert share({LIVE: 6}, members) == {"busy": [(LIVE, 0)], "stays": all_of(LIVE, 6)[1:]}


def test_if_all_leave_nothing_is_left_without_an_owner() -> None:
    held = frozenset({(LIVE, 0)})
    shares = share({LIVE: 4}, {"a": Member(BOTH, held, 4, leaving=True), "b": Member(BOTH, leaving=True)})
    assert [len(shares[name]) for name in "ab"] == [2, 2]
    assert (LIVE, 0) in shares["a"]


def test_a_claim_that_another_has_by_now_is_not_kept() -> None:
    claim = frozenset({(LIVE, 0)})
    members = {"late": Member(BOTH, claim, 2, leaving=True), "owner": Member(BOTH, claim, 3)}
    assert share({LIVE: 2}, members) == {"late": [], "owner": all_of(LIVE, 2)}


@given(counts, st.sets(st.sampled_from("abcdef"), min_size=2), st.data())
def test_every_partition_has_one_owner_and_who_stays_shares_evenly(
    partitions: dict[str, int], names: set[str], data: st.DataObject
) -> None:
    before = share(partitions, {name: Member(BOTH) for name in names})
    going = data.draw(st.sets(st.sampled_from(sorted(names)), max_size=len(names) - 1))
    gone = data.draw(st.sets(st.sampled_from(sorted(going)))) if going else set[str]()
    members = {
        name: Member(BOTH, frozenset(held), 1, name in going) for name, held in before.items() if name not in gone
    }
    after = share(partitions, members)
    every: list[Partition] = sorted(all_of(BATCH, partitions[BATCH]) + all_of(LIVE, partitions[LIVE]))
    assert sorted(partition for held in after.values() for partition in held) == every
    assert all(after[name] == sorted(before[name]) for name in going - gone)
    for topic in BOTH:
        of_topic = [sum(name == topic for name, _ in after[who]) for who in names - going]
        assert max(of_topic) - min(of_topic) <= 1
