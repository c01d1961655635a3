"""Membership in the work group: which partitions this worker owns, a window over each, what is fetched and what is committed.

A partition that comes back in the next generation is kept as it was, jobs and all. Any other assignment starts at the committed offset,
and the first records past it may have been started by a former owner: `Held.fence_below` tells which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    GroupAuthorizationFailedError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationFailedError,
)

from decisions import window as rules
from decisions.window import Window
from infra.kafka import make_consumer
from infra.positions import handed_out
from infra.settings import WorkerSettings
from workers.assignor import new_assignor

log = structlog.get_logger("worker")

FETCH_WAIT_MS = 100
HEARTBEAT_INTERVAL_MS = 300
"""By it a member learns that the group shares anew, which waits for all."""
POLL_INTERVAL_MAX_MS = 24 * 3_600_000
"""A full window may wait for one long answer; the heartbeat alone says whether a worker is alive."""
REVOKE_WAIT_S = 3.0
"""What a rebalance waits for answers to be released and offsets to be committed."""
FAILURE_WAIT_S = 1.0
FAILURES_MAX = 60
"""In a row; then the worker gives up, and exits."""
FIRST_GENERATION = 1
"""Before this one a group has had no owners."""


@dataclass(slots=True, eq=False)
class Held:
    """A partition while this worker owns it. `generation` is the group's; records below `fence_below` may have had an owner before."""

    tp: TopicPartition
    generation: int
    window: Window
    fence_below: int
    gap: tuple[int, int] | None = field(default=None)


class Owner(Protocol):
    """What the group tells its worker. Both are called during a rebalance, which waits for them."""

    async def release(self) -> None:
        """Release what runs: the partitions may be another's next."""

    async def assigned(self, lost: list[Held]) -> None:
        """Drop what belongs to `lost`; go on with the rest."""


class Group:
    """See the module. `fetch` is called by one task; `commit` by any."""

    def __init__(
        self, settings: WorkerSettings, group_id: str, topics: Iterable[str], records: int, owner: Owner
    ) -> None:
        """`records` is the window's size, the same for all workers of the version. Topics must exist."""
        self._settings = settings
        self._topics = tuple(topics)
        self._records = records
        self._owner = owner
        self._assignor = new_assignor()
        self._commit_lock = asyncio.Lock()
        self._room = asyncio.Event()
        self._fresh: set[TopicPartition] = set()
        self._failures = 0
        self._leaving: asyncio.Task[None] | None = None
        self.generation = 0
        self.held: dict[TopicPartition, Held] = {}
        self._consumer: AIOKafkaConsumer = make_consumer(
            settings.kafka,
            group=group_id,
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=min(HEARTBEAT_INTERVAL_MS, settings.session_timeout_ms // 3),
            rebalance_timeout_ms=settings.session_timeout_ms,
            max_poll_interval_ms=POLL_INTERVAL_MAX_MS,
            partition_assignment_strategy=(self._assignor,),
            client_id=settings.worker_id,
        )

    @property
    def joined(self) -> bool:
        """Whether the group has given this worker its share, which may be nothing."""
        return self.generation > 0

    async def start(self) -> None:
        """Joins the group in the background."""
        await self._consumer.start()
        self._consumer.subscribe(self._topics, listener=_Listener(self))

    def take_no_more(self) -> None:
        """Keeps what it has, and gets nothing more while others can have it: it is about to leave."""
        self._assignor.leaving = True

    async def stop(self) -> None:
        """Leaves the group, so that the others need not wait for the session to end. Nothing is committed after it. Safe to call again."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._consumer.stop(), name="leave the group")
        await asyncio.shield(self._leaving)

    async def fetch(self) -> list[tuple[Held, ConsumerRecord[bytes, bytes]]]:
        """New records, taken into their windows; empty after `FETCH_WAIT_MS` without any.

        What the broker's absence makes fail is tried again, for a while; an engine is slower to start again than a broker.
        """
        try:
            taken = await self._fetch()
        except (CommitFailedError, IllegalStateError):  # the assignment changed under this call
            await asyncio.sleep(FETCH_WAIT_MS / 1000)
            return []
        except (GroupAuthorizationFailedError, TopicAuthorizationFailedError):
            raise
        except KafkaError as error:
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                raise
            log.warning("can't fetch; trying again", error=repr(error), failures=self._failures)
            if not (error.retriable or isinstance(error, KafkaTimeoutError)):
                # The group's coordination failed, and aiokafka only begins it anew when it joins anew.
                self._consumer._coordinator.request_rejoin()  # noqa: SLF001
            await asyncio.sleep(FAILURE_WAIT_S)
            return []
        self._failures = 0
        return taken

    async def _fetch(self) -> list[tuple[Held, ConsumerRecord[bytes, bytes]]]:
        await self._open_fresh()
        rooms = {tp: room for tp, held in self.held.items() if (room := self._room_of(held)) > 0}
        if not rooms:
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), FETCH_WAIT_MS / 1000)
            except TimeoutError:
                pass
            return []
        batches = await self._consumer.getmany(*rooms, timeout_ms=FETCH_WAIT_MS, max_records=min(rooms.values()))
        taken = [taken for tp, records in batches.items() for taken in self._take(tp, records)]
        for tp, position in handed_out(self._consumer).items():
            if (held := self.held.get(tp)) is not None:  # what wasn't handed out by now no client can read
                held.window = rules.pass_over(held.window, position)
        return taken

    def _room_of(self, held: Held) -> int:
        return rules.room(held.window, self._records, self._settings.window_bytes)

    def _take(
        self, tp: TopicPartition, records: list[ConsumerRecord[bytes, bytes]]
    ) -> list[tuple[Held, ConsumerRecord[bytes, bytes]]]:
        held = self.held.get(tp)
        if held is None:
            return []
        records = [record for record in records if record.offset >= held.window.next]
        if (
            records
            and records[0].offset != held.window.next
            and held.gap != (gap := (held.window.next, records[0].offset))
        ):
            # Either the log has a gap here, or a rebalance came between: the next fetch tells.
            held.gap = gap
            self._consumer.seek(tp, held.window.next)
            return []
        for record in records:
            held.window = rules.take(held.window, record.offset, len(record.value or b""))
        return [(held, record) for record in records]

    async def _open_fresh(self) -> None:
        """Finds where newly assigned partitions begin."""
        fresh, generation = set(self._fresh), self.generation
        if not fresh:
            return
        firsts = await self._consumer.beginning_offsets(list(fresh))
        for tp in fresh:
            committed = await self._consumer.committed(tp)
            start = max(committed or 0, firsts[tp])
            if committed is None:
                # A group without offsets is soon forgotten, and its generations would begin anew while its attempts still count.
                await self._consumer.commit({tp: start})
            if generation != self.generation:
                return
            fence_below = start + self._records if generation > FIRST_GENERATION else start
            self._consumer.seek(tp, start)
            self.held[tp] = Held(tp, generation, Window.at(start), fence_below)
            self._fresh.discard(tp)

    def holds(self, held: Held) -> bool:
        """Whether the partition is still this worker's, in the same possession."""
        return self.held.get(held.tp) is held

    def finish(self, held: Held, offset: int) -> None:
        """All that a record caused is confirmed. A partition that was lost meanwhile ignores it."""
        held.window = rules.finish(held.window, offset)

    @property
    def commit_due(self) -> bool:
        """Whether a commit should not wait: a window is half used up by records that are finished."""
        return any(held.window.committable - held.window.committed >= self._records // 2 for held in self.held.values())

    async def commit(self) -> None:
        """Commits below the lowest unfinished record of each partition. If the group has moved on, the next owner does that work again."""
        async with self._commit_lock:
            if self._leaving is not None:
                return
            due = {tp: held for tp, held in self.held.items() if held.window.committable > held.window.committed}
            if not due:
                return
            offsets = {tp: held.window.committable for tp, held in due.items()}
            try:
                await self._consumer.commit(dict(offsets))
            except (CommitFailedError, IllegalStateError) as error:
                log.info("a commit came too late", error=type(error).__name__)
                return
            for tp, held in due.items():
                held.window = rules.confirm(held.window, offsets[tp])
            self._room.set()

    async def revoked(self) -> None:
        """Before a rebalance: release what runs and commit what is finished, as far as time allows."""
        try:
            async with asyncio.timeout(REVOKE_WAIT_S):
                await self._owner.release()
                await self.commit()
        except TimeoutError:
            log.warning("a rebalance did not wait any longer", waited_s=REVOKE_WAIT_S)

    async def rebalanced(self, assigned: set[TopicPartition]) -> None:
        """After a rebalance: keep what came back, drop what didn't."""
        # aiokafka tells a listener the partitions but not the generation, which orders attempts.
        generation: int = self._consumer._coordinator.generation  # noqa: SLF001
        # The same one comes again when a member joins once more without need: nobody had anything in between.
        before, unbroken = self.held, generation in (self.generation, self.generation + 1)
        self.held = {tp: held for tp, held in before.items() if tp in assigned and unbroken}
        self._fresh = assigned - set(self.held)
        self.generation = generation
        for tp, held in self.held.items():
            held.generation = generation
            held.gap = None
            self._consumer.seek(tp, held.window.next)
        lost = [held for tp, held in before.items() if tp not in self.held]
        log.info("assigned", generation=generation, partitions=len(assigned), kept=len(self.held), lost=len(lost))
        await self._owner.assigned(lost)
        self._room.set()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    def __init__(self, group: Group) -> None:
        self._group = group

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:  # noqa: ARG002
        await self._group.revoked()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        await self._group.rebalanced(set(assigned))
