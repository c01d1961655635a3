"""ONNX Runtime as an engine: a model file on CPU, requests batched, behind the port of `tensors`.

A model directory holds `model.onnx`, and `config.json` where the processor needs labels or features. `engine_args` are as
`infra.onnx_args` says. Each instance has a thread of its own, and a session of its own where a run has further threads; the event loop only cuts requests into parts and puts answers
together, which takes tens of microseconds a request. Of large ones that is done in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import structlog

from decisions.batching import Limits
from infra.cores import usable_cores
from infra.onnx_args import OnnxArgs, parse_args
from infra.onnx_signature import FileSignature
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.tensors import BYTES, elements
from workers.engines.batcher import Batcher
from workers.engines.company import differs_in_company
from workers.engines.instances import now_ms
from workers.engines.onnx_session import Session
from workers.engines.port import EngineConfig, EngineDead, EngineError, EngineStats
from workers.engines.tensors import TensorRequest, TensorResult
from workers.processors.choice import make_processor
from workers.processors.port import Processor

INSTANCES = 2
"""Where nothing is said and there are as many cores."""
STRINGS_IN_LOOP_MAX, ROWS_IN_LOOP_MAX, VALUES_IN_LOOP_MAX = 64, 1_000, 10_000
"""A request with more elements of BYTES or more rows, and an answer with more values, isn't the event loop's work."""

T = TypeVar("T")

log = structlog.get_logger("onnx")


class OnnxEngine:
    """See the module."""

    def __init__(self, config: EngineConfig, processor: str = "") -> None:
        """Takes the configuration. Raises HeadraceError (invalid_request) for engine arguments that it doesn't know."""
        self._config = config
        self._name = processor
        self._args: OnnxArgs = parse_args(config.engine_args, processor)
        self._processor: Processor | None = None
        self._batcher: Batcher | None = None
        self.file: FileSignature | None = None

    async def start(self) -> None:
        """Loads a session for each instance, in threads."""
        args, folder = self._args, Path(self._config.artifact)
        cores = usable_cores()
        instances = args.instances or min(INSTANCES, cores)
        threads = args.intra_op_threads or max(1, cores // instances)
        sessions = await _sessions(folder, threads, instances)
        self.file = sessions[0].file
        if await self._must_run_alone(sessions[0]):
            args = replace(args, max_batch_size=1)
        limits = Limits(args.max_batch_size, args.max_queue_delay_ms, args.preferred_batch_sizes)
        self._processor = make_processor(self._name, self.file, folder, args, self._config.context_length)
        self._batcher = Batcher(limits, sessions, self._processor, args.max_run_ms)
        log.info(
            "the model is loaded",
            model=self._config.model,
            processor=self._name or "none",
            instances=instances,
            threads=threads,
            max_batch_size=args.max_batch_size if self.file.batched else self.file.fixed_rows or 1,
            batched=self.file.batched,
        )

    async def _must_run_alone(self, session: Session) -> bool:
        """Whether rows would differ by what shares their batch, where nobody said that they may."""
        if "max_batch_size" in self._config.engine_args or self._args.max_batch_size == 1 or not session.file.batched:
            return False
        if not await asyncio.to_thread(differs_in_company, session):
            return False
        log.warning(
            "the model's rows differ by what shares their batch; each runs by itself unless max_batch_size is set",
            model=self._config.model,
        )
        return True

    async def infer(self, request: TensorRequest) -> TensorResult:
        """The answer; see the port."""
        batcher, processor, long = self._batcher, self._processor, _is_long(request)
        if batcher is None or processor is None:
            raise EngineDead("the engine isn't started")
        prepared = await _done(long, lambda: processor.prepare(request))
        if not prepared.parts:
            outputs = await _done(long, lambda: prepared.finish(()))
            return TensorResult(outputs, batch=0, queue_ms=0.0, model_ms=0.0)
        deadline_ms = now_ms() + request.deadline_ms - time.time() * 1000
        call = await batcher.run(prepared.parts, deadline_ms, request.priority)
        values = sum(array.size for part in call.results for array in part)
        outputs = await _done(long or values > VALUES_IN_LOOP_MAX, lambda: prepared.finish(call.results))
        begun_ms = call.arrived_ms if call.begun_ms is None else call.begun_ms
        return TensorResult(outputs, call.rows, queue_ms=begun_ms - call.arrived_ms, model_ms=call.model_ms)

    def stats(self) -> EngineStats:
        """Parts of requests that run and that wait. Raises EngineDead once every instance hangs."""
        return EngineStats() if self._batcher is None else self._batcher.stats

    async def shutdown(self) -> None:
        """Ends what runs, and frees the sessions."""
        batcher, self._batcher, self._processor = self._batcher, None, None
        if batcher is not None and not await batcher.close(HeadraceError(Reason.UNAVAILABLE, "the engine shuts down")):
            log.warning("a run of the model doesn't end; its thread ends with the process")


async def _sessions(folder: Path, threads: int, instances: int) -> list[Session]:
    """One for each instance. A run without threads of its own shares nothing with others' but the weights, so these are loaded once."""
    if threads == 1:
        return [await asyncio.to_thread(Session, folder, threads)] * instances
    return await asyncio.gather(*(asyncio.to_thread(Session, folder, threads) for _ in range(instances)))


def _is_long(request: TensorRequest) -> bool:
    """Whether going through a request's rows holds up others."""
    strings = sum(elements(tensor.shape) for tensor in request.inputs if tensor.datatype == BYTES)
    rows = min((tensor.shape[0] for tensor in request.inputs if tensor.shape), default=0)
    return strings > STRINGS_IN_LOOP_MAX or rows > ROWS_IN_LOOP_MAX


async def _done(long: bool, work: Callable[[], T]) -> T:
    """What a processor makes, in a thread if that takes long. Raises HeadraceError."""
    try:
        return await asyncio.to_thread(work) if long else work()
    except HeadraceError:
        raise
    except Exception as error:
        raise _fault(error) from error


def _fault(error: Exception) -> EngineError:
    log.error("the processor failed", error=repr(error))
    return EngineError(f"the processor failed: {type(error).__name__}: {error}")
