"""That a member is about to leave travels with what it held, from its next joining on."""

from __future__ import annotations

from typing import Any

from aiokafka.structs import TopicPartition

from tests.workers.test_assignor import TOPICS, Cluster, assign
from workers.assignor import new_assignor


def joined(generation: int, **members: Any) -> dict[str, set[TopicPartition]]:
    """A generation of the group: every member is told what it gets."""
    told = {name: member.metadata(TOPICS) for name, member in members.items()}
    leader = next(iter(members.values()))
    for name, assignment in leader.assign(Cluster(), told).items():
        members[name].on_assignment(assignment)
        members[name].on_generation_assignment(generation)
    return {name: set(held) for name, held in assign(leader, told).items()}


def test_a_member_that_leaves_gets_nothing_more() -> None:
    idle, busy, stays = new_assignor(), new_assignor(), new_assignor()
    before = joined(1, idle=idle, busy=busy, stays=stays)
    busy.leaving = True
    assert joined(2, idle=idle, busy=busy, stays=stays) == before
    after = joined(3, busy=busy, stays=stays)
    assert after == {"busy": before["busy"], "stays": before["stays"] | before["idle"]}
    assert len(joined(4, busy=busy)["busy"]) == 8


def test_a_member_that_never_had_anything_says_nothing() -> None:
    leaving = new_assignor()
    leaving.leaving = True
    assert leaving.metadata(TOPICS).user_data == b""
    assert not new_assignor().leaving
