"""How a worker group shares its partitions: each topic evenly, then all of them together, and moving as few as that allows.

A topic is a tier. Evenness over all partitions alone could give one worker every partition of `interactive` and another every one of
`batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Partition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as it joins: the topics it reads, what it held in which generation of the group, and whether it is about to leave."""

    topics: frozenset[str]
    held: frozenset[Partition] = field(default_factory=frozenset)
    generation: int = -1
    leaving: bool = False


def share(counts: Mapping[str, int], members: Mapping[str, Member]) -> dict[str, list[Partition]]:
    """Every partition of the topics, by the member that gets it. `counts` gives the partitions of each topic.

    Of one topic, no member that reads it has two more than another. One partition more than others' goes to who has the fewest in all,
    then to who held one. Of two members that claim a partition, the one of the higher generation held it. Whoever is about to leave
    keeps what it held and gets no more, if anybody else can: it begins nothing, and what waits there would wait for it.
    """
    owners = _owners(members)
    shares: dict[str, list[Partition]] = {name: [] for name in members}
    for topic in sorted(counts):
        readers = sorted(name for name, member in members.items() if topic in member.topics)
        partitions = [(topic, number) for number in range(counts[topic])]
        if staying := [name for name in readers if not members[name].leaving]:
            kept = [each for each in partitions if owners.get(each, "") in set(readers) - set(staying)]
            for partition in kept:
                shares[owners[partition]].append(partition)
            partitions = [each for each in partitions if each not in kept]
            readers = staying
        if readers:
            _share_topic(partitions, readers, owners, shares)
    return {name: sorted(partitions) for name, partitions in shares.items()}


def _owners(members: Mapping[str, Member]) -> dict[Partition, str]:
    """Who held each partition last."""
    owners: dict[Partition, str] = {}
    for name in sorted(members, key=lambda name: (members[name].generation, name)):
        owners.update(dict.fromkeys(members[name].held, name))
    return owners


def _share_topic(
    partitions: list[Partition],
    readers: list[str],
    owners: Mapping[Partition, str],
    shares: dict[str, list[Partition]],
) -> None:
    each, extra = divmod(len(partitions), len(readers))
    held: dict[str, list[Partition]] = {name: [] for name in readers}
    free: list[Partition] = []
    for partition in partitions:
        held.get(owners.get(partition, ""), free).append(partition)
    by_total = sorted(readers, key=lambda name: (len(shares[name]), len(held[name]) <= each, name))
    quotas = {name: each + (place < extra) for place, name in enumerate(by_total)}
    for name in readers:
        shares[name] += held[name][: quotas[name]]
        free += held[name][quotas[name] :]
    free.sort()
    for name in readers:
        missing = quotas[name] - min(quotas[name], len(held[name]))
        shares[name] += free[:missing]
        del free[:missing]
