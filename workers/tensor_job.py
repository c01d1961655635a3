"""One request's run on a tensor model."""

from __future__ import annotations

from dataclasses import dataclass

from decisions.takeover import Plan
from infra import metrics
from infra.log import Headers
from schemas.errors import HeadraceError
from schemas.events import Attempt, ChoiceEnd, InferenceScheduled
from schemas.reasons import Reason
from schemas.topics import ANSWER_MAX_BYTES, TIERS
from workers.engines.port import EngineError, EngineStats
from workers.engines.tensors import TensorEngine, TensorRequest, TensorResult
from workers.job import Job, Tools


@dataclass(frozen=True, slots=True)
class TensorModel:
    """An engine that infers tensors."""

    engine: TensorEngine

    def job(
        self, tools: Tools, work: InferenceScheduled, attempt: Attempt, plan: Plan, headers: Headers, *, fenced: bool
    ) -> Job:
        """A run of one request; see `Job`."""
        return TensorJob(self, tools, work, attempt, plan, headers, fenced=fenced)

    def stats(self) -> EngineStats:
        """What the engine does now. Raises EngineDead."""
        return self.engine.stats()


class TensorJob(Job):
    """See `Job`. Its one choice has no tokens."""

    def __init__(
        self,
        model: TensorModel,
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

    @property
    def _prompt_tokens(self) -> int:
        return self.work.prompt_tokens

    async def _generate(self, ends: list[ChoiceEnd | None]) -> None:
        result = await self._inferred()
        size = sum(len(tensor.data) for tensor in result.outputs)
        if size > ANSWER_MAX_BYTES:
            text = f"the outputs have {size} bytes; at most {ANSWER_MAX_BYTES} are told: ask for fewer outputs, or give fewer rows"
            raise EngineError(text, Reason.ANSWER_TOO_LARGE)
        metrics.of(metrics.BATCH_ROWS, self.work.model, self.work.version).observe(result.batch)
        self._outputs = result.outputs
        ends[0] = ChoiceEnd(0, 0, "stop")

    async def _inferred(self) -> TensorResult:
        work, attempt = self.work, self.attempt
        try:
            return await self._model.engine.infer(
                TensorRequest(
                    key=f"{work.request_id}.{attempt.generation}.{attempt.counter}",
                    inputs=work.inputs or (),
                    outputs=work.outputs,
                    parameters=work.parameters,
                    deadline_ms=work.deadline_ms,
                    priority=TIERS.index(work.tier) if work.tier in TIERS else len(TIERS),
                    tenant=work.tenant,
                    shared=work.cache_key if work.shared else "",
                )
            )
        except EngineError:
            raise
        except HeadraceError as error:  # what is wrong with this request alone
            raise EngineError(error.message, error.reason) from error
