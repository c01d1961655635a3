"""Equal requests for tensors that run at once have one run: an engine around another, for those that may share, each priority by itself.

The first begins it and the others wait for its result. Who leaves, leaves alone; the run ends early only when the last has left. If it fails,
or misses the first one's deadline, the others ask by themselves.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from infra import metrics
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from workers.engines.port import EngineDead, EngineError, EngineStats
from workers.engines.tensors import TensorEngine, TensorRequest, TensorResult

_Name = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Run:
    """One run of the engine, and how many wait for it."""

    task: asyncio.Task[TensorResult]
    waiting: int = 0


class SharedTensors:
    """See the module. Implements `tensors.TensorEngine` by the engine that it is given."""

    def __init__(self, engine: TensorEngine) -> None:
        """Nothing is shared but what says that it may be: `TensorRequest.shared`."""
        self._engine = engine
        self._runs: dict[_Name, _Run] = {}
        self._made = 0

    async def start(self) -> None:
        """Starts the engine."""
        await self._engine.start()

    async def infer(self, request: TensorRequest) -> TensorResult:
        """The answer, by a run of its own or one that it shares."""
        if not request.shared:
            return await self._engine.infer(request)
        run, first = self._join(request)
        try:
            return await self._result(run, request, first)
        except EngineDead:
            raise
        except HeadraceError:
            if first or _late(request):
                raise
        return await self._engine.infer(request)

    def stats(self) -> EngineStats:
        """The engine's: a run counts once, however many wait for it."""
        return self._engine.stats()

    async def shutdown(self) -> None:
        """Ends every run, and the engine."""
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.shutdown()

    def _join(self, request: TensorRequest) -> tuple[_Run, bool]:
        """The run for a request, and whether it is the first to ask for it."""
        name = _name(request)
        if (run := self._runs.get(name)) is not None:
            metrics.SHARED_GENERATIONS.inc()
            return run, False
        self._made += 1
        own = replace(request, key=f"shared.{self._made}")
        task = asyncio.create_task(self._engine.infer(own), name="shared run")
        run = self._runs[name] = _Run(task)
        task.add_done_callback(lambda _: self._end(name, run))
        return run, True

    def _end(self, name: _Name, run: _Run) -> None:
        self._part(name, run)
        if not run.task.cancelled():
            run.task.exception()  # whoever waits is told; asyncio need not complain of what nobody waited for

    def _part(self, name: _Name, run: _Run) -> None:
        """Nobody joins it any more."""
        if self._runs.get(name) is run:
            del self._runs[name]

    async def _result(self, run: _Run, request: TensorRequest, first: bool) -> TensorResult:
        left_s = None if first else max(0.0, request.deadline_ms / 1000 - time.time())
        run.waiting += 1
        try:
            async with asyncio.timeout(left_s):
                return await asyncio.shield(run.task)
        except TimeoutError:
            raise EngineError(Reason.DEADLINE_EXCEEDED.text, Reason.DEADLINE_EXCEEDED) from None
        finally:
            run.waiting -= 1
            if run.waiting == 0 and not run.task.done():
                self._part(_name(request), run)
                run.task.cancel()


def _name(request: TensorRequest) -> _Name:
    """A run waits by its first one's priority: who is in a hurry doesn't wait with who isn't."""
    return request.shared, request.priority


def _late(request: TensorRequest) -> bool:
    return time.time() * 1000 >= request.deadline_ms
