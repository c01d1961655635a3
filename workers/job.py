"""One request's run on this worker, whatever the model makes: takes its slot, writes the answer's start and its ending."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import structlog

from decisions.takeover import Action, Plan
from infra import metrics
from infra.log import EventProducer, Headers, RecordTooLarge
from infra.objects import StoreAway
from schemas.events import Attempt, ChoiceEnd, InferenceScheduled, Tensor, Timings
from schemas.reasons import Reason
from text.detokenize import usage
from workers.answer import Answer
from workers.engines.port import EngineDead, EngineError
from workers.slots import Slots

log = structlog.get_logger("worker")


class Stop(Enum):
    """Why a job is stopped from outside, and whether its record is then finished."""

    CANCELLED = "cancelled"
    LOST = "lost"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Tools:
    """What all jobs of a worker share. `count_tokens` is told of tokens as they are made."""

    producer: EventProducer
    slots: Slots
    worker_id: str
    linger_ms: int
    count_tokens: Callable[[int], None]


class Job(ABC):
    """Runs one attempt. `run` is awaited once, by a task of its own; `stop`, `release` and `keep` come from the worker's loop."""

    def __init__(
        self, tools: Tools, work: InferenceScheduled, attempt: Attempt, plan: Plan, headers: Headers, *, fenced: bool
    ) -> None:
        """`plan` says what to go on from, `fenced` that somebody may have begun it before; the caller has taken one slot for it."""
        self._tools = tools
        self.work = work
        self._plan = plan
        self._fenced = fenced
        self._answer = Answer(tools.producer, work, attempt, tools.worker_id, headers, tools.linger_ms)
        self._stopped: Stop | None = None
        self._task: asyncio.Task[None] | None = None
        self._spare_slot = True
        self._labels = (work.model, work.version, work.tier)
        self._queue_ms = 0.0
        self._started_s = 0.0
        self._first_token_s: float | None = None
        self._last_sent_s = 0.0
        self._cached_tokens = 0
        self._outputs: tuple[Tensor, ...] = ()

    @abstractmethod
    async def _generate(self, ends: list[ChoiceEnd | None]) -> None:
        """Makes the answer, and fills `ends`, or `_outputs`. Raises EngineError, EngineDead."""

    @property
    @abstractmethod
    def _prompt_tokens(self) -> int:
        """Tokens that the request gives the model to read."""

    async def run(self, queue_ms: float) -> str:
        """Returns the outcome: `completed`, a reason's value, or what `stop` was told. Raises EngineDead, and what the producer raises."""
        self._queue_ms = queue_ms
        metrics.of(metrics.QUEUE_SECONDS, *self._labels).observe(queue_ms / 1000)
        metrics.of(metrics.SLOTS_USED, *self._labels).inc()
        try:
            outcome = await self._run()
        finally:
            self._answer.close()
            if self._spare_slot:
                self._give_slot()
        if outcome not in (Stop.LOST.value, Stop.RELEASED.value):  # those go on elsewhere
            metrics.of(metrics.REQUESTS, *self._labels, outcome).inc()
        return outcome

    def stop(self, why: Stop) -> None:
        """Ends generation. Nothing more is written, but for what a release needs."""
        if self._stopped is None:
            self._stopped = why
            if self._task is not None:
                self._task.cancel()

    @property
    def attempt(self) -> Attempt:
        """The attempt that it writes."""
        return self._answer.attempt

    def _stopped_by(self) -> Stop | None:
        """What `stop` was told meanwhile."""
        return self._stopped

    async def release(self) -> None:
        """See `Answer.release`."""
        await self._answer.release()

    async def keep(self) -> None:
        """See `Answer.keep`."""
        if self._stopped is None:
            await self._answer.keep()

    async def hand_over(self) -> None:
        """See `Answer.hand_over`."""
        await self._answer.hand_over()

    async def _run(self) -> str:
        self._started_s = time.monotonic()
        if self._stopped is not None:
            return self._stopped.value
        self._answer.start(self._plan.totals, self._queue_ms)
        if self._plan.action is Action.POISONED:
            return await self._fail(Reason.POISONED, f"{Reason.POISONED.text} {self._plan.detail}.")
        if self._plan.action is Action.LOST:
            return await self._fail(Reason.WORKER_LOST, f"{Reason.WORKER_LOST.text} {self._plan.detail.capitalize()}.")
        if self._fenced:
            # It may be what ended its former owner: an attempt that nobody sees begin would never be counted.
            await self._answer.started()
        if (stopped := self._stopped_by()) is not None:
            return stopped.value
        ends: list[ChoiceEnd | None] = [None] * self.work.sampling.n
        self._task = asyncio.create_task(self._generate(ends))
        try:
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        return await self._close(self._task, [end for end in ends if end is not None])

    async def _close(self, task: asyncio.Task[None], ends: Sequence[ChoiceEnd]) -> str:
        if self._stopped is not None:
            if not task.cancelled() and isinstance(task.exception(), EngineDead):
                task.result()
            if self._stopped is Stop.RELEASED:
                await self._answer.hand_over()
            return self._stopped.value
        try:
            task.result()
        except EngineDead:
            raise
        except EngineError as error:
            log.warning("the engine failed on a request", request_id=self.work.request_id, message=error.message)
            return await self._fail(error.reason, error.message)
        except (StoreAway, RecordTooLarge) as error:
            return await self._fail_unstored(error)
        now_s = time.monotonic()
        metrics.of(metrics.MODEL_SECONDS, *self._labels).observe(now_s - self._started_s)
        first_s = now_s if self._first_token_s is None else self._first_token_s
        timings = Timings(self._queue_ms, (first_s - self._started_s) * 1000, (now_s - self._started_s) * 1000)
        used = usage(self._prompt_tokens, self._answer.totals, cached_tokens=self._cached_tokens)
        self._count(used.prompt_tokens, self._cached_tokens)
        try:
            await self._answer.complete(tuple(ends), used, timings, self._outputs)
        except (StoreAway, RecordTooLarge) as error:
            return await self._fail_unstored(error)
        return "completed"

    async def _fail_unstored(self, error: StoreAway | RecordTooLarge) -> str:
        """A part of the answer is too large for a record, and the object store is away, or it is too large for that as well."""
        log.error("an answer can't be stored", request_id=self.work.request_id, message=error.message)
        self._answer.give_up()
        if isinstance(error, RecordTooLarge):
            return await self._fail(Reason.ANSWER_TOO_LARGE, Reason.ANSWER_TOO_LARGE.text)
        return await self._fail(Reason.UNAVAILABLE, "The object store can't be reached at present.")

    async def _fail(self, reason: Reason, message: str) -> str:
        used = usage(self._prompt_tokens, self._answer.totals, cached_tokens=self._cached_tokens)
        await self._answer.fail(reason, message, used)
        return reason.value

    def _give_slot(self) -> None:
        self._spare_slot = False
        metrics.of(metrics.SLOTS_USED, *self._labels).dec()
        self._tools.slots.give()

    def _count(self, prompt: int, cached: int) -> None:
        metrics.of(metrics.TOKENS, *self._labels, "prompt").inc(prompt)
        metrics.of(metrics.TOKENS, *self._labels, "cached_prompt").inc(cached)
