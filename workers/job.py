"""One request's run on this worker: takes slots, folds the engine's tokens to text, writes the answer and its ending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

import structlog

from decisions.takeover import Action, Plan
from infra import metrics
from infra.log import EventProducer, Headers
from schemas.events import Alternative, Attempt, ChoiceEnd, InferenceScheduled, Timings, TokenLogprob
from schemas.reasons import Reason
from schemas.topics import TIERS
from text.detokenize import Finish, TextFold, TextState, usage
from text.scores import finite
from text.tokenizer import Tokenizer
from workers.answer import Answer
from workers.engines.port import Engine, EngineChunk, EngineDead, EngineError, EngineRequest, Scored
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

    engine: Engine
    producer: EventProducer
    tokenizer: Tokenizer
    slots: Slots
    worker_id: str
    linger_ms: int
    count_tokens: Callable[[int], None]


class Job:
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
        self._text = TextFold.of(tools.tokenizer, work.sampling)
        self._stopped: Stop | None = None
        self._task: asyncio.Task[None] | None = None
        self._spare_slot = True
        self._labels = (work.model, work.version, work.tier)
        self._queue_ms = 0.0
        self._started_s = 0.0
        self._first_token_s: float | None = None
        self._last_sent_s = 0.0
        self._cached_tokens = 0

    async def run(self, queue_ms: float) -> str:
        """Returns the outcome: `completed`, a reason's value, or what `stop` was told. Raises EngineDead, and what the producer raises."""
        self._queue_ms = queue_ms
        metrics.QUEUE_SECONDS.labels(*self._labels).observe(queue_ms / 1000)
        metrics.SLOTS_USED.labels(*self._labels).inc()
        try:
            outcome = await self._run()
        finally:
            self._answer.close()
            if self._spare_slot:
                self._give_slot()
        if outcome not in (Stop.LOST.value, Stop.RELEASED.value):  # those go on elsewhere
            metrics.REQUESTS.labels(*self._labels, outcome).inc()
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
            return await self._fail(Reason.ENGINE_ERROR, error.message)
        now_s = time.monotonic()
        metrics.MODEL_SECONDS.labels(*self._labels).observe(now_s - self._started_s)
        first_s = now_s if self._first_token_s is None else self._first_token_s
        timings = Timings(self._queue_ms, (first_s - self._started_s) * 1000, (now_s - self._started_s) * 1000)
        used = usage(len(self.work.prompt_token_ids), self._answer.totals, cached_tokens=self._cached_tokens)
        self._count(used.prompt_tokens, self._cached_tokens)
        await self._answer.complete(tuple(ends), used, timings)
        return "completed"

    async def _fail(self, reason: Reason, message: str) -> str:
        used = usage(len(self.work.prompt_token_ids), self._answer.totals, cached_tokens=self._cached_tokens)
        await self._answer.fail(reason, message, used)
        return reason.value

    # --- choices -----------------------------------------------------------------------------------------------------

    async def _generate(self, ends: list[ChoiceEnd | None]) -> None:
        """Fills `ends`. If a choice fails the others stop, and the first failure is raised."""
        if len(ends) == 1:
            await self._choice(0, ends)
            return
        tasks = [asyncio.create_task(self._choice(index, ends)) for index in range(len(ends))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for kind in (EngineDead, Exception, BaseException):
            if (found := next((failure for failure in failures if isinstance(failure, kind)), None)) is not None:
                raise found

    async def _choice(self, index: int, ends: list[ChoiceEnd | None]) -> None:
        accepted = self._plan.accepted[index]
        state, _, finish = self._text.fold_all(accepted)
        if finish is None:
            if self._spare_slot:
                self._spare_slot = False
            else:
                await self._tools.slots.acquire()
                metrics.SLOTS_USED.labels(*self._labels).inc()
            try:
                state = await self._read(index, accepted, state)
            finally:
                self._give_slot()
        ends[index] = self._end(index, state)

    def _give_slot(self) -> None:
        self._spare_slot = False
        metrics.SLOTS_USED.labels(*self._labels).dec()
        self._tools.slots.give()

    def _end(self, index: int, state: TextState) -> ChoiceEnd:
        finish, text = state.finish, ""
        if finish is None:  # the engine made no more, at its own limit
            finish, text = Finish("length"), self._text.tail(state)
        return ChoiceEnd(index, state.made, finish.reason, finish.stop_reason, text)

    async def _read(self, index: int, accepted: tuple[int, ...], state: TextState) -> TextState:
        """Reads the engine's tokens of one choice to its end, by the fold or by the engine."""
        request = self._request(index, accepted)
        async with aclosing(self._tools.engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.cached_tokens and index == 0:
                    self._cached_tokens = min(chunk.cached_tokens, len(self.work.prompt_token_ids))
                if chunk.token_ids:
                    state = await self._fold(index, state, chunk)
                if chunk.finished or state.finish is not None:
                    break
        return state

    async def _fold(self, index: int, state: TextState, chunk: EngineChunk) -> TextState:
        before = state.made
        state, text, _ = self._text.fold(state, chunk.token_ids)
        count = state.made - before
        logprobs = None if chunk.logprobs is None else self._logprobs(chunk.token_ids[:count], chunk.logprobs)
        self._tools.count_tokens(count)
        metrics.TOKENS.labels(*self._labels, "output").inc(count)
        sent = await self._answer.add(index, chunk.token_ids[:count], text, logprobs)
        self._time(count, sent)
        return state

    def _request(self, index: int, accepted: tuple[int, ...]) -> EngineRequest:
        work, sampling = self.work, self.work.sampling
        budget = replace(
            sampling,
            n=1,
            max_tokens=(sampling.max_tokens or 0) - len(accepted),
            min_tokens=max(0, sampling.min_tokens - len(accepted)),
            seed=None if sampling.seed is None else sampling.seed + index,
        )
        attempt = self._answer.attempt
        key = f"{work.request_id}.{index}.{attempt.generation}.{attempt.counter}"
        return EngineRequest(
            key,
            work.prompt_token_ids + accepted,
            budget,
            len(accepted),
            work.cache_salt,
            TIERS.index(work.tier) if work.tier in TIERS else len(TIERS),
        )

    def _logprobs(self, ids: tuple[int, ...], scored: tuple[Scored, ...]) -> tuple[TokenLogprob, ...]:
        name = self._tools.tokenizer.token_bytes
        return tuple(
            TokenLogprob(
                token_id,
                name(token_id),
                finite(score.logprob),
                tuple(Alternative(other, name(other), finite(logprob)) for other, logprob in score.top),
            )
            for token_id, score in zip(ids, scored, strict=False)
        )

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _time(self, count: int, sent: bool) -> None:
        if not sent:
            return
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now_s
            metrics.TTFT_SECONDS.labels(*self._labels).observe(max(0.0, time.time() - self.work.requested_ms / 1000))
        else:
            metrics.ITL_SECONDS.labels(*self._labels).observe((now_s - self._last_sent_s) / max(1, count))
        self._last_sent_s = now_s

    def _count(self, prompt: int, cached: int) -> None:
        metrics.TOKENS.labels(*self._labels, "prompt").inc(prompt)
        metrics.TOKENS.labels(*self._labels, "cached_prompt").inc(cached)
