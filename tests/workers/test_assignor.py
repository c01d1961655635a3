"""The assignor as aiokafka calls it: what members held travels with them."""

from __future__ import annotations

from typing import Any

from aiokafka.structs import TopicPartition

from workers.assignor import new_assignor

TOPICS = ["work.m.1.batch", "work.m.1.interactive"]


class Cluster:
    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return {0, 1, 2, 3} if topic in TOPICS else None


def assign(assignor: Any, members: dict[str, Any]) -> dict[str, list[TopicPartition]]:
    return {name: given.partitions() for name, given in assignor.assign(Cluster(), members).items()}


def test_a_second_worker_gets_half_of_each_tier_and_the_first_keeps_the_rest() -> None:
    first, second = new_assignor(), new_assignor()
    alone = assign(first, {"a": first.metadata(TOPICS)})
    assert len(alone["a"]) == 8
    first.on_assignment(first.assign(Cluster(), {"a": first.metadata(TOPICS)})["a"])
    first.on_generation_assignment(1)
    both = assign(second, {"a": first.metadata(TOPICS), "b": second.metadata(TOPICS)})
    for held in both.values():
        assert [tp.topic for tp in held] == sorted(TOPICS * 2)
    assert not set(both["a"]) & set(both["b"])


def test_a_topic_without_partitions_gives_nothing() -> None:
    assignor = new_assignor()
    assert assign(assignor, {"a": assignor.metadata(["none"])}) == {"a": []}
