"""The worker's loop: fetch into windows, fence what may have an owner, choose, run, commit, report.

Tasks: one that fetches, one that commits and drops what is past its deadline, one that reports, one for each running request and one
for each batch being taken over. If any of them fails the loop ends, and with it the process: the log's next owner goes on.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing, suppress
from dataclasses import replace

import structlog
from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from decisions.takeover import Action
from decisions.window import guest_slots, window_records
from infra import metrics
from infra.log import EventDecoder, EventProducer, NoSuchPartition
from infra.payloads import Payloads
from infra.settings import WorkerSettings
from infra.tracing import child
from schemas.errors import HeadraceError
from schemas.events import Attempt, GenerationReleased, ModelVersionRegistered, PartitionReport
from schemas.payloads import is_reference
from schemas.reasons import Reason
from schemas.topics import work_topic
from workers.control import Control
from workers.engines.port import EngineDead, EngineStats
from workers.goodbye import HANDOVER_WAIT_S, LEAVE_WAIT_S, await_jobs, leave
from workers.group import Group, Held
from workers.intake import Intake
from workers.job import Job, Stop, Tools
from workers.promises import Promises
from workers.report import DRAINING, READY, Load, Reporter, served_tiers
from workers.retry import persist
from workers.slots import Slots
from workers.takeover import TakeOver
from workers.tasks import Tasks
from workers.tensor_job import TensorModel
from workers.token_job import LanguageModel
from workers.turns import Turns
from workers.work import RequestKey, Work, fresh_plan, refusal, tell_and_wait
from workers.works import Works

log = structlog.get_logger("worker")

COUNTER_BITS = 32
COUNTER_SALT_BITS = 20


def group_id(model: str, version: str) -> str:
    """The consumer group of a model version's workers."""
    return f"work.{model}.{version}"


class WorkerLoop:
    """One worker of one model version. The engine is started, and the producer too; topics exist."""

    def __init__(
        self,
        settings: WorkerSettings,
        version: ModelVersionRegistered,
        model: LanguageModel | TensorModel,
        producer: EventProducer,
        reporter: Reporter,
        payloads: Payloads | None = None,
    ) -> None:
        """Nothing runs before `run`."""
        self._settings = settings
        self._version = version
        self._model = model
        self._producer = producer
        self._reporter = reporter
        slots = settings.slots or version.slots
        self._slots = Slots(slots + guest_slots(slots), self._fill, guest_slots(slots))
        self._tools = Tools(producer, self._slots, settings.worker_id, settings.chunk_linger_ms, reporter.rate.count)
        self._records = window_records(settings.window_records, version.slots)
        tiers = served_tiers(settings, version)
        topics = [work_topic(version.model, version.version, tier) for tier in tiers]
        self._group = Group(settings, group_id(version.model, version.version), topics, self._records, self)
        self._control = Control(settings.kafka, self._cancel)
        decoder = EventDecoder(settings.kafka, payloads)
        self._takeover = TakeOver(settings, producer, decoder)
        self._works = Works(self._group, topics)
        self._intake = Intake(
            version, producer, decoder, lambda key: key in self._works or self._control.is_cancelled(key)
        )
        self._promises = Promises(settings.kafka, version, slots, tiers)
        self._turns = Turns(lambda: self._promises.room(self._slots.used))
        self._tasks = Tasks()
        self._keeping: asyncio.Task[None] | None = None
        self._rebalancing = False
        self._draining = False
        # Attempts of one generation must differ between workers too: a record may be in the log twice.
        self._counter = random.getrandbits(COUNTER_SALT_BITS) << COUNTER_BITS
        self._committed_s = 0.0
        reporter.load = self._load

    @property
    def not_ready(self) -> str | None:
        """Why it can't take work yet, or None."""
        if self._draining:
            return "draining"
        return self._producer.failure if self._group.joined else "waiting for the group's assignment"

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then drains. Raises what made it unable to go on."""
        await self._takeover.start()
        try:
            await self._promises.start()
            await self._control.start()
            await self._group.start()
            await self._reporter.change(READY)
            fetching = self._tasks.serve(self._fetch())
            self._tasks.serve(self._keep())
            self._tasks.serve(self._reporter.run())
            await self._tasks.until(stop)
            fetching.cancel()
            await self._drain()
        finally:
            await self._leave()
        if self._tasks.failure is not None:
            raise self._tasks.failure

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        while True:
            fenced = []
            for held, record in await self._group.fetch():
                if is_reference(record.value):
                    self._tasks.serve(self._take_large(held, record))
                elif (work := await self._take(held, record)) is not None and work.fence:
                    fenced.append(work)
            if fenced:
                self._tasks.serve(self._take_over(fenced))
            self._fill()

    async def _take(self, held: Held, record: ConsumerRecord[bytes, bytes]) -> Work | None:
        """Opens a record, which then waits for its turn unless it is to be fenced first."""
        work = await self._intake.open(held, record)
        if not self._group.holds(held):
            return None  # lost meanwhile: it is opened again by whoever has it next
        if work is None:
            self._group.finish(held, record.offset)
            return None
        self._works.hold(work)
        if not work.fence:
            self._turns.wait(work)
        return work

    async def _take_large(self, held: Held, record: ConsumerRecord[bytes, bytes]) -> None:
        """What is in the object store is fetched beside the others. None is lost by that: a record counts as finished when it is."""
        places, work = await self._works.large(held), None
        try:
            work = await self._take(held, record)
        finally:
            if work is None:
                places.release()
        if work is not None:
            work.large = True
            if work.fence:
                await self._take_over([work])
        self._fill()

    async def _keep(self) -> None:
        """Commits, at the interval or when a window needs it, and drops what is past its deadline."""
        interval_s = self._settings.commit_interval_ms / 1000
        while True:
            await asyncio.sleep(interval_s / 4)
            committed_s = time.monotonic()
            if self._group.commit_due or committed_s - self._committed_s >= interval_s:
                self._committed_s = committed_s
                await self._group.commit()
                self._drop_late()

    # --- taking ------------------------------------------------------------------------------------------------------

    async def _take_over(self, works: list[Work]) -> None:
        async def fence() -> list[tuple[Work, HeadraceError]]:
            for work in works:
                work.attempt = self._next_attempt(work.held)
            return await self._takeover.take_over(works)

        for work, error in await persist(fence):
            await self._bury(work, error)
        for work in works:
            if not self._works.has(work):
                continue
            assert work.plan is not None
            if work.plan.action in (Action.SKIP, Action.LEAVE):
                self._works.finish(work)
            else:
                work.waiting = replace(work.waiting, standing=work.plan.standing)
                self._turns.wait(work)
        self._fill()

    def _next_attempt(self, held: Held) -> Attempt:
        self._counter += 1
        return Attempt(held.generation, self._counter)

    # --- running -----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begins what waits, while slots are free and what is under way allows it."""
        while self._turns.waiting and self._slots.free and not (self._draining or self._rebalancing):
            if self._engine_dead or (work := self._turns.take()) is None:
                return
            if work.late(_now_ms()):
                self._tasks.serve(self._refuse(work, Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED.text))
            else:
                self._begin(work)

    @property
    def _engine_dead(self) -> bool:
        """What begins on a dead engine counts as failed, though nothing ran."""
        try:
            self._model.stats()
        except EngineDead:
            return True
        return False

    def _begin(self, work: Work) -> None:
        attempt = work.attempt or self._next_attempt(work.held)
        try:
            plan = work.plan or fresh_plan(work.scheduled)
            job = self._model.job(
                self._tools, work.scheduled, attempt, plan, child(work.headers), fenced=work.plan is not None
            )
        except HeadraceError as error:
            self._tasks.serve(self._refuse(work, error.reason, error.message))
            return
        self._slots.take()
        work.job = job
        self._turns.begin(job, work)
        self._tasks.answer(self._run(work, job))

    async def _run(self, work: Work, job: Job) -> None:
        began_s = time.monotonic()
        try:
            await self._see_through(work, job)
        finally:
            self._reporter.service.count((time.monotonic() - began_s) * 1000)
            self._turns.end(job)
        self._fill()

    async def _see_through(self, work: Work, job: Job) -> None:
        """Runs a job to its end, and does what its outcome asks. Only then is it no longer under way."""
        try:
            outcome = await job.run(max(0.0, _now_ms() - work.timestamp_ms))
        except EngineDead:
            if not self._draining:
                raise
            await job.hand_over()  # whoever told this process to end told the engine's too
            self._works.let_go(work)
            return
        except HeadraceError as error:
            if error.retriable:
                await self._recover(work, job)
            else:
                await self._bury(work, error)
            return
        if outcome in (Stop.LOST.value, Stop.RELEASED.value):
            self._works.let_go(work)
            return
        if outcome == Reason.POISONED.value:
            await self._intake.put_aside(work.record, outcome, Reason.POISONED.text)
        self._works.finish(work)

    async def _recover(self, work: Work, job: Job) -> None:
        """A send failed, so nobody knows what the stream holds: gives the attempt up and takes the request over from itself."""
        if not self._works.has(work):
            return
        work.job, work.plan, work.attempt = None, None, None
        released = GenerationReleased(work.scheduled.request_id, job.attempt, self._settings.worker_id)
        with suppress(NoSuchPartition):  # then the takeover puts it aside
            await persist(lambda: tell_and_wait(self._producer, work, released))
        await self._take_over([work])

    async def _bury(self, work: Work, error: HeadraceError) -> None:
        await self._intake.bury(work, error)
        self._works.finish(work)

    async def _refuse(self, work: Work, reason: Reason, message: str) -> None:
        asked = work.scheduled
        failed = refusal(asked, reason, message)
        try:
            await persist(lambda: tell_and_wait(self._producer, work, failed))
        except HeadraceError as error:
            await self._bury(work, error)
            return
        metrics.REQUESTS.labels(asked.model, asked.version, asked.tier, reason.value).inc()
        self._works.finish(work)

    def _drop_late(self) -> None:
        for work in self._turns.drop_late(_now_ms()):
            self._tasks.serve(self._refuse(work, Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED.text))
        self._fill()  # one that is gone may have held others back

    def _cancel(self, key: RequestKey) -> None:
        """The caller no longer wants it: admission has written its ending."""
        work = self._works.find(key)
        if work is None:
            return
        if work.job is not None:
            work.job.stop(Stop.CANCELLED)
            return
        self._turns.drop(work)
        self._works.finish(work)
        self._fill()  # it may have held others back

    # --- the group's owner -------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """Releases what runs, which goes on, before a rebalance, and begins nothing until it is over."""
        self._rebalancing = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        # A job whose send failed finds that out itself.
        await asyncio.gather(*(job.release() for _, job in self._works.running()), return_exceptions=True)

    async def assigned(self, lost: list[Held]) -> None:
        """Drops what belongs to partitions that are another's now; keeps the rest."""
        for work in self._works.lost(lost):
            self._turns.drop(work)
            if work.job is not None:
                work.job.stop(Stop.LOST)
        if not self._draining:  # who leaves takes no release back
            # The group waits for this call, so whatever waits for the broker goes on beside it.
            self._keeping = self._tasks.serve(self._keep_running())
        self._rebalancing = False
        self._fill()

    async def _keep_running(self) -> None:
        for _, job in self._works.running():
            await job.keep()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Finishes what runs if there is time, and hands the rest over."""
        self._draining = True
        self._group.take_no_more()
        await self._reporter.mention(DRAINING)
        drain_s = self._settings.drain_ms / 1000
        await await_jobs(self._tasks.jobs, self._tasks.failed, drain_s, hopeless=self._log_away)
        handing = asyncio.create_task(self._hand_over())
        await await_jobs(self._tasks.jobs, self._tasks.failed, HANDOVER_WAIT_S, hopeless=self._log_away)
        handing.cancel()
        await asyncio.wait({handing})
        for _, job in self._works.running():
            job.stop(Stop.RELEASED)
        await await_jobs(self._tasks.jobs, self._tasks.failed, LEAVE_WAIT_S)

    async def _hand_over(self) -> None:
        """Leaves the group while answers go on, and stops each when its next owner has begun to take it over."""
        running = [work for work, _ in self._works.running()]
        try:
            await self.release()
            await self._group.commit()
            async with aclosing(self._takeover.hand_over(running, self._group.stop)) as taken:
                async for work in taken:
                    if work.job is not None:
                        work.job.stop(Stop.LOST)
        except (KafkaError, HeadraceError) as error:
            log.warning("could not watch the answers being taken over", error=repr(error))

    async def _leave(self) -> None:
        self._draining = True
        await self._tasks.end()
        await self._promises.stop()
        await leave(self._group, self._control, self._takeover, self._reporter, away=self._log_away())

    def _log_away(self) -> bool:
        return self._producer.failure is not None

    def _load(self) -> Load:
        reports = tuple(
            PartitionReport(held.tp.topic, held.tp.partition, held.window.committed, held.window.finished_above)
            for held in self._group.held.values()
        )
        try:
            stats = self._model.stats()
        except EngineDead:
            if not self._draining:
                raise
            stats = EngineStats()
        metrics.SLOTS.labels(self._version.model, self._version.version).set(self._promises.slots)
        return Load(
            reports, self._promises.slots, self._slots.used, self._turns.waiting, stats.kv_cache_use, self._records
        )


def _now_ms() -> int:
    return int(time.time() * 1000)
