"""One request's run on a language model: folds the engine's tokens to text and writes them as they come."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, replace

from decisions.takeover import Plan
from infra import metrics
from infra.log import Headers
from schemas.events import Alternative, Attempt, ChoiceEnd, InferenceScheduled, TokenLogprob
from schemas.topics import TIERS
from text.detokenize import Finish, TextFold, TextState
from text.scores import finite
from text.tokenizer import Tokenizer
from workers.engines.port import Engine, EngineChunk, EngineDead, EngineRequest, EngineStats, Scored
from workers.job import Job, Tools


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """An engine that generates tokens, and what makes text of them."""

    engine: Engine
    tokenizer: Tokenizer

    def job(
        self, tools: Tools, work: InferenceScheduled, attempt: Attempt, plan: Plan, headers: Headers, *, fenced: bool
    ) -> Job:
        """A run of one request; see `Job`. Raises HeadraceError for sampling parameters that can't be."""
        return TokenJob(self, tools, work, attempt, plan, headers, fenced=fenced)

    def stats(self) -> EngineStats:
        """What the engine does now. Raises EngineDead."""
        return self.engine.stats()


class TokenJob(Job):
    """See `Job`."""

    def __init__(
        self,
        model: LanguageModel,
        tools: Tools,
        work: InferenceScheduled,
        attempt: Attempt,
        plan: Plan,
        headers: Headers,
        *,
        fenced: bool,
    ) -> None:
        super().__init__(tools, work, attempt, plan, headers, fenced=fenced)
        self._model = model
        self._text = TextFold.of(model.tokenizer, work.sampling)

    @property
    def _prompt_tokens(self) -> int:
        return len(self.work.prompt_token_ids)

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

    def _end(self, index: int, state: TextState) -> ChoiceEnd:
        finish, text = state.finish, ""
        if finish is None:  # the engine made no more, at its own limit
            finish, text = Finish("length"), self._text.tail(state)
        return ChoiceEnd(index, state.made, finish.reason, finish.stop_reason, text)

    async def _read(self, index: int, accepted: tuple[int, ...], state: TextState) -> TextState:
        """Reads the engine's tokens of one choice to its end, by the fold or by the engine."""
        request = self._request(index, accepted)
        async with aclosing(self._model.engine.generate(request)) as chunks:
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
            work.cache_key if work.shared else "",
        )

    def _logprobs(self, ids: tuple[int, ...], scored: tuple[Scored, ...]) -> tuple[TokenLogprob, ...]:
        name = self._model.tokenizer.token_bytes
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
