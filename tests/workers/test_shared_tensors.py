"""Equal requests for tensors that run at once have one run."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from schemas.events import Tensor
from schemas.reasons import Reason
from workers.engines.port import EngineError, EngineStats
from workers.engines.shared_tensors import SharedTensors
from workers.engines.tensors import TensorRequest, TensorResult

SOON_MS = 60_000


class Held:
    """An engine whose runs end when told."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.ended: list[str] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def start(self) -> None:
        pass

    async def infer(self, request: TensorRequest) -> TensorResult:
        self.runs.append(request.key)
        try:
            await self.go.wait()
        finally:
            self.ended.append(request.key)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return TensorResult(request.inputs, 1, 0.0, 0.0)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.runs) - len(self.ended))

    async def shutdown(self) -> None:
        pass


def request(key: str, shared: str = "same", within_ms: int = SOON_MS) -> TensorRequest:
    deadline_ms = int(time.time() * 1000) + within_ms
    return TensorRequest(key, (Tensor("x", "UINT8", (1,), b"a"),), (), {}, deadline_ms, 0, "acme", shared)


async def started(shared: SharedTensors, *requests: TensorRequest) -> list[asyncio.Task[TensorResult]]:
    tasks = [asyncio.create_task(shared.infer(each)) for each in requests]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_equal_ones_have_one_run_and_each_its_result() -> None:
    engine = Held()
    shared = SharedTensors(engine)
    tasks = await started(shared, *(request(key) for key in "abc"), request("d", "other"), request("e", ""))
    assert (len(engine.runs), shared.stats().running) == (3, 3)
    engine.go.set()
    assert {result.outputs for result in await asyncio.gather(*tasks)} == {request("a").inputs}
    await shared.infer(request("f"))
    assert len(engine.runs) == 4, "what has ended answers nobody else"


async def test_one_in_a_hurry_does_not_wait_with_one_that_is_not() -> None:
    engine = Held()
    shared = SharedTensors(engine)
    slow, fast = replace(request("a"), priority=1), request("b")
    tasks = await started(shared, slow, fast, replace(request("c"), priority=1), request("d"))
    assert len(engine.runs) == 2
    for task in tasks[1::2]:
        task.cancel()
    await asyncio.wait(tasks[1::2])
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.ended == [engine.runs[1]], "each run has its own callers"
    engine.go.set()
    assert all(result.outputs for result in await asyncio.gather(tasks[0], tasks[2]))


async def test_who_leaves_leaves_alone_and_the_last_ends_the_run() -> None:
    engine = Held()
    shared = SharedTensors(engine)
    first, second = await started(shared, request("a"), request("b"))
    first.cancel()
    await asyncio.wait({first})
    assert not engine.ended
    second.cancel()
    await asyncio.wait({second})
    await asyncio.sleep(0)
    assert engine.ended == engine.runs
    (third,) = await started(shared, request("c"))
    assert len(engine.runs) == 2
    engine.go.set()
    await third


async def test_a_failure_is_the_firsts_and_the_others_ask_by_themselves() -> None:
    engine = Held()
    shared = SharedTensors(engine)
    engine.error = EngineError("no")
    first, second = await started(shared, request("a"), request("b"))
    engine.go.set()
    with pytest.raises(EngineError, match="no"):
        await first
    assert (await second).batch == 1
    assert engine.runs[1:] == ["b"]


async def test_a_followers_deadline_is_its_own() -> None:
    engine = Held()
    shared = SharedTensors(engine)
    (first,) = await started(shared, request("a"))
    with pytest.raises(EngineError) as caught:
        await shared.infer(replace(request("b", within_ms=20)))
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    engine.go.set()
    await first


async def test_the_end_ends_all() -> None:
    engine = Held()
    shared = SharedTensors(engine)
    (first,) = await started(shared, request("a"))
    await shared.shutdown()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert engine.ended == engine.runs
