"""Places in the queue of a version on a tier: no more wait for its workers than its `max_queue_depth` says.

A place is had by what was let in and no worker has begun (the ledgers and the workers' reports count that), by what is held back or parked (the
turnstile counts that, of each tenant), and by what is on its way to either: it is being fetched or decided. `Places` counts these. So a place is
taken before anything of a request is waited for, nobody who comes meanwhile has it, and nobody who has it is told that the queue is full.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from decisions import waiting
from decisions.cases import Case, Refusal, World
from decisions.placement import SeenWorker, serves
from schemas.events import Position
from schemas.reasons import Reason
from schemas.topics import work_topic

RETRY_AFTER_MIN_MS = 1_000

Queue = tuple[str, str]
"""Of one tier: model and version."""


class Places:
    """Which requests, by where they were asked, have a place and are not in the queue yet. Giving back what isn't had changes nothing."""

    def __init__(self) -> None:
        """Nobody has one."""
        self._of: dict[Position, Queue] = {}
        self._taken: Counter[Queue] = Counter()

    def take(self, who: Position, queue: Queue) -> None:
        """In this queue, and in no other any more."""
        self.give_back(who)
        self._of[who] = queue
        self._taken[queue] += 1

    def give_back(self, who: Position) -> None:
        """It is in the queue now, or comes to none."""
        if (queue := self._of.pop(who, None)) is not None:
            self._taken[queue] -= 1
            if not self._taken[queue]:
                del self._taken[queue]

    def has(self, who: Position, queue: Queue) -> bool:
        """Whether it has one in this queue."""
        return self._of.get(who) == queue

    def others(self, who: Position, queue: Queue) -> int:
        """How many have one beside it."""
        return self._taken[queue] - self.has(who, queue)


def limited(case: Case) -> bool:
    """Whether only so many may wait where a routed case goes."""
    return case.tier in case.routed.max_queue_depth


def has_room(case: Case, world: World) -> bool:
    """Whether a routed case without a place may take one, if `ahead` have one that aren't in the queue."""
    return full(case, world, outlook(case, world)) is None


def full(case: Case, world: World, seen: waiting.Outlook) -> Refusal | None:
    """Why a routed case has no place in its queue, by what is `seen` of it; None if it has one, or may."""
    version = case.routed
    depth = None if case.placed else version.max_queue_depth.get(case.tier)
    if depth is None:
        return None
    if not seen.ready:  # nobody tells what is finished in the log, but ledgers know what waits
        seen = replace(seen, waiting=case.ahead + world.queued(version.model, version.version))
    if seen.free or seen.waiting < depth:
        return None
    return Refusal(
        Reason.OVERLOADED,
        f"{seen.waiting} requests wait for the model `{version.model}` already, and no more than {depth} may. Try again later.",
        "model",
        room_in_ms(seen, seen.waiting - depth + 1),
    )


def outlook(case: Case, world: World) -> waiting.Outlook:
    """What a routed case has before it."""
    version = case.routed
    return waiting.outlook(
        work_topic(version.model, version.version, case.tier),
        pool(case, world),
        world.ends,
        case.now_ms,
        world.start_up_ms(version.model, version.version),
        case.stale_ms,
        case.ahead,
    )


def pool(case: Case, world: World) -> list[SeenWorker]:
    """The workers that serve a routed case's version on its tier."""
    version = case.routed
    return [seen for seen in world.workers(version.model, version.version) if serves(seen.report, case.tier)]


def room_in_ms(seen: waiting.Outlook, count: int) -> int:
    """When to come again if so many that wait must have begun before: as long as that takes, as far as can be told."""
    return max(RETRY_AFTER_MIN_MS, seen.begun_ms(count) or 0)
