"""Tells `workers` what this worker is doing: every second, and whenever its state changes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from infra.log import EventProducer
from infra.settings import WorkerSettings
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered, PartitionReport, WorkerReported
from schemas.topics import WORKERS

log = structlog.get_logger("worker")

STARTING, READY, DRAINING, STOPPED = "starting", "ready", "draining", "stopped"
RATE_SPAN_S = 10.0
SERVICE_RUNS = 32
"""Of so many last requests the time in a slot is averaged."""
MENTION_WAIT_S = 2.0


class TokenRate:
    """Tokens a second over the last `RATE_SPAN_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing made yet."""
        self._clock = clock
        self._total = 0
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])

    def count(self, tokens: int) -> None:
        """More tokens were made."""
        self._total += tokens

    def mark(self) -> float:
        """Tokens a second, to be asked at regular intervals."""
        now_s = self._clock()
        self._marks.append((now_s, self._total))
        while len(self._marks) > 2 and now_s - self._marks[0][0] > RATE_SPAN_S:
            self._marks.popleft()
        first_s, first = self._marks[0]
        return (self._total - first) / (now_s - first_s) if now_s > first_s else 0.0


class ServiceTime:
    """How long requests run in a slot: the average of the last `SERVICE_RUNS`."""

    def __init__(self) -> None:
        self._runs: deque[float] = deque(maxlen=SERVICE_RUNS)

    def count(self, run_ms: float) -> None:
        """One more has run so long, however it ended: so long it took its slot."""
        self._runs.append(run_ms)

    @property
    def mean_ms(self) -> float:
        """0 before the first."""
        return sum(self._runs) / len(self._runs) if self._runs else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker holds now. `finished` counts records finished above the committed offset."""

    partitions: tuple[PartitionReport, ...] = ()
    slots: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_use: float | None = None
    window_records: int = 0

    @property
    def finished(self) -> int:
        """Records finished above the committed offsets."""
        return sum(report.finished_above for report in self.partitions)


def served_tiers(settings: WorkerSettings, version: ModelVersionRegistered) -> list[str]:
    """What a worker of a version serves: of its settings' tiers those that the version has."""
    return [tier for tier in settings.tiers if tier in version.tiers]


class Reporter:
    """Sends reports. `load` tells what to report; `state` is changed by `change`."""

    def __init__(
        self,
        producer: EventProducer,
        worker_id: str,
        version: ModelVersionRegistered,
        interval_ms: int,
        tiers: Sequence[str] = (),
    ) -> None:
        """The state is `starting`. `tiers` are those that the worker serves."""
        self._producer = producer
        self._worker_id = worker_id
        self._version = version
        self._interval_s = interval_ms / 1000
        self._tiers = tuple(tiers)
        self._started_ms = int(time.time() * 1000)
        self.state = STARTING
        self._start_up_ms = 0
        self.rate = TokenRate()
        self.service = ServiceTime()
        self.load: Callable[[], Load] = Load

    async def change(self, state: str) -> None:
        """Enters a state and tells so; `stopped` also removes the worker from the compacted topic."""
        self.state = state
        if state == READY and not self._start_up_ms:
            self._start_up_ms = int(time.time() * 1000) - self._started_ms
        await self.report()
        if state == STOPPED:
            await (await self._producer.send_raw(WORKERS, None, self._worker_id.encode()))

    async def mention(self, state: str) -> None:
        """Enters a state and tells so if the log takes it soon; nobody waits for that."""
        try:
            async with asyncio.timeout(MENTION_WAIT_S):
                await self.change(state)
        except (TimeoutError, HeadraceError) as error:
            log.warning("a report was not delivered", error=repr(error))

    async def run(self) -> None:
        """Reports until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.report()
            except HeadraceError as error:
                if not error.retriable:
                    raise
                log.warning("a report was not delivered", message=error.message)

    async def report(self) -> None:
        """Sends one report; returns when the broker has confirmed it."""
        load, version = self.load(), self._version
        event = WorkerReported(
            self._worker_id, version.model, version.version, self.state, load.partitions, load.slots, load.running, load.waiting, load.finished,
            load.kv_cache_use, self.rate.mark(), version.digest, self._started_ms,
            self.service.mean_ms, self._start_up_ms, load.window_records, self._tiers,
        )  # fmt: skip
        await self._producer.send_and_wait(WORKERS, event, key=self._worker_id)
