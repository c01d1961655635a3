"""A producer that waits a moment for more records while they come in groups anyhow.

aiokafka sends what there is at once. Of a group of records that come within milliseconds the first goes alone, and the others after it: twice
the requests, and each costs a broker and its readers as much as dozens of records. So who lately sent several records at once waits
`GATHER_S` from the first of the next; who sends one at a time waits for nothing.
"""

from __future__ import annotations

from typing import Any

from aiokafka import TopicPartition
from aiokafka.producer.message_accumulator import BatchBuilder, MessageAccumulator, MessageBatch

GATHER_S = 0.005
GROUP = 4.0
"""Records of a partition that went together, on the average of late, from which on it is worth waiting."""
WEIGHT = 1 / 8
"""Of the newest batch in that average."""


class Gathering(MessageAccumulator):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's, which lingers by what went before. Batches of one node go together: who is due takes along who isn't yet."""

    _usual = 1.0

    def _append_batch(self, builder: BatchBuilder, tp: TopicPartition) -> MessageBatch:
        self._linger_time = GATHER_S if self._usual >= GROUP else 0.0
        return super()._append_batch(builder, tp)

    def drain_by_nodes(self, ignore_nodes: Any, muted_partitions: Any = frozenset()) -> tuple[dict[int, Any], bool]:
        """What is ready, by node; see the base."""
        firsts = [batches[0] for place, batches in self._batches.items() if place not in muted_partitions]
        if any(not first.remaining_linger() for first in firsts):
            for first in firsts:
                first._linger_time = 0.0  # noqa: SLF001
        nodes, unknown = super().drain_by_nodes(ignore_nodes, muted_partitions)
        for batches in nodes.values():
            for batch in batches.values():
                self._usual += (batch.record_count - self._usual) * WEIGHT
        return nodes, unknown
