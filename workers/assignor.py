"""The group's assignor: `decisions.shares` in aiokafka's form. The member that leads the group runs it for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from decisions.shares import Member, share

LEAVING = b"leaving"


def new_assignor() -> type[StickyPartitionAssignor]:
    """An assignor for one consumer: aiokafka keeps what a member held in its class."""
    return type("Shares", (_Shares,), {"member_assignment": None, "leaving": False})


class _Shares(StickyPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
    """Members tell what they held as aiokafka's sticky assignor has it; who gets what is decided here."""

    name = "headrace-shares"
    leaving = False
    """Whether this member is about to leave, which it tells when it next joins."""

    @classmethod
    def metadata(cls, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        """What this member tells: a mark behind what it held, which former versions don't read."""
        told = super().metadata(topics)
        mark = LEAVING if cls.leaving and told.user_data else b""
        return ConsumerProtocolMemberMetadata(told.version, told.subscription, told.user_data + mark)

    @classmethod
    def assign(cls, cluster: Any, members: Mapping[str, Any]) -> dict[str, ConsumerProtocolMemberAssignment]:
        """What each member gets."""
        joined = {
            name: _member(cls.parse_member_metadata(metadata), metadata.user_data.endswith(LEAVING))
            for name, metadata in members.items()
        }
        topics = {topic for member in joined.values() for topic in member.topics}
        counts = {topic: len(cluster.partitions_for_topic(topic) or ()) for topic in topics}
        shares = share(counts, joined)
        return {
            name: ConsumerProtocolMemberAssignment(cls.version, _by_topic(partitions), b"")
            for name, partitions in shares.items()
        }


def _member(told: Any, leaving: bool) -> Member:
    held = frozenset((tp.topic, tp.partition) for tp in told.partitions)
    return Member(frozenset(told.subscription), held, told.generation, leaving)


def _by_topic(partitions: Iterable[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    return [(topic, [number for _, number in group]) for topic, group in groupby(partitions, key=lambda pair: pair[0])]
