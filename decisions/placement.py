"""Which partition of a work topic takes a request: the one whose worker has the least to do for each of its slots.

A worker's report tells what it had committed and finished; the partition's end tells what has been written since, by
whoever wrote it. Their difference is the backlog: what waits, and what runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from schemas.events import WorkerReported

READY = "ready"
STALE_MS = 10_000
"""A worker that has not reported for this long counts as gone. Brokers' clocks may differ by less than this."""


class SeenWorker(Protocol):
    """A worker's last report and the timestamp of its record."""

    @property
    def report(self) -> WorkerReported:
        """What it said of itself."""

    @property
    def seen_ms(self) -> int:
        """When."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The partition chosen, and on what grounds."""

    partition: int
    detail: str


@dataclass(frozen=True, slots=True)
class _Load:
    worker_id: str
    per_slot: float
    backlog: int


def place(
    request_id: str,
    topic: str,
    partitions: int,
    workers: Iterable[SeenWorker],
    ends: Mapping[tuple[str, int], int],
    now_ms: int,
    stale_ms: int = STALE_MS,
    beside: int | None = None,
) -> Placement:
    """Choose a partition of `topic`, which has `partitions` of them.

    `workers` are those that serve the model version, in any order and state; reports older than `stale_ms` before
    `now_ms`, the request's own timestamp, are not believed. `ends` gives, by (topic, partition), the offset after the
    last record known there.

    Equal work that went to the partition `beside` a moment ago draws it there while its worker is ready: both may have one generation.

    A partition that no ready worker reports is chosen last; ties, and a model without any worker, go by the request's id.
    """
    loads: dict[int, _Load] = {}
    for seen in workers:
        if seen.report.state == READY and now_ms - seen.seen_ms <= stale_ms:
            for partition, load in _loads(seen.report, topic, ends):
                if 0 <= partition < partitions and (
                    partition not in loads or load.per_slot < loads[partition].per_slot
                ):
                    loads[partition] = load
    if not loads:
        chosen = min(range(partitions), key=lambda partition: _draw(request_id, partition))
        return Placement(chosen, f"no worker of {topic} is ready; by request id")
    if beside is not None and beside in loads:
        return Placement(beside, f"beside equal work, on worker {loads[beside].worker_id}")
    chosen = min(
        loads, key=lambda partition: (loads[partition].per_slot, loads[partition].backlog, _draw(request_id, partition))
    )
    load = loads[chosen]
    return Placement(
        chosen, f"worker {load.worker_id} has {load.per_slot:.2f} records a slot, {load.backlog} on the partition"
    )


def _loads(report: WorkerReported, topic: str, ends: Mapping[tuple[str, int], int]) -> list[tuple[int, _Load]]:
    """The load of each partition of `topic` that the worker holds."""
    found = backlogs(report, topic, ends)
    per_slot = _total(report, found) / max(1, report.slots)
    return [(partition, _Load(report.worker_id, per_slot, backlog)) for partition, backlog in found.items()]


def serves(report: WorkerReported, tier: str) -> bool:
    """Whether a worker takes requests of a tier: tiers may have pools of their own."""
    return not report.tiers or tier in report.tiers


def total(report: WorkerReported, topic: str, ends: Mapping[tuple[str, int], int]) -> int:
    """What waits and runs on a worker, as one tier sees it: what waits in its other tiers isn't in this one's way, what runs is."""
    return _total(report, backlogs(report, topic, ends))


def _total(report: WorkerReported, found: Mapping[int, int]) -> int:
    return max(report.running, sum(found.values()))


def backlogs(report: WorkerReported, topic: str, ends: Mapping[tuple[str, int], int]) -> dict[int, int]:
    """By partition of a topic that the worker holds, the records there that aren't finished."""
    return {
        held.partition: max(0, ends.get((topic, held.partition), held.committed) - held.committed - held.finished_above)
        for held in report.partitions
        if held.topic == topic
    }


def _draw(request_id: str, partition: int) -> int:
    """The same for ever, and even over requests."""
    return zlib.crc32(f"{request_id}/{partition}".encode())
