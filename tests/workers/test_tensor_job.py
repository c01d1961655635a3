"""An answer in tensors that is too large to be written ends all the same, and says why; the next is told as ever."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.log import EventProducer
from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from infra.settings import KafkaSettings
from schemas.events import (
    Attempt,
    GenerationStarted,
    InferenceCompleted,
    InferenceFailed,
    InferenceScheduled,
    Reply,
    Sampling,
    Tensor,
)
from schemas.topics import ANSWER_MAX_BYTES
from tests.workers.test_answer import Broker
from workers.engines.port import EngineStats
from workers.engines.tensors import TensorRequest, TensorResult
from workers.job import Tools
from workers.slots import Slots
from workers.tensor_job import TensorModel
from workers.work import fresh_plan

RID = "01890a5d-ac96-774b-bcce-b302099a8057"
INPUTS = (Tensor("x", "UINT8", (1,), b"a"),)


class Zeros:
    """Gives as many bytes as it is asked for, and remembers by what requests."""

    def __init__(self) -> None:
        self.asked: list[TensorRequest] = []

    async def start(self) -> None:
        pass

    async def infer(self, request: TensorRequest) -> TensorResult:
        self.asked.append(request)
        size = int(request.parameters["size"])
        return TensorResult((Tensor("y", "UINT8", (size,), bytes(size)),), 1, 0.0, 0.0)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def shutdown(self) -> None:
        pass


class Log(Broker):
    """Takes what the log's own producer can encode."""

    def __init__(self, producer: EventProducer) -> None:
        super().__init__(0)
        self._producer = producer

    async def send(self, _topic: str, event: Any, **more: Any) -> asyncio.Future[Any]:
        await self._producer.encoded(event, more["encoding"], more["owner"])
        return await super().send(_topic, event, **more)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(EventProducer(KafkaSettings(), "test", Payloads(FolderStore(tmp_path))))


async def run(log: Log, size: int, engine: Zeros | None = None, **more: Any) -> tuple[str, list[Any]]:
    """The outcome of a request for so many bytes, and what was written of it."""
    slots, before = Slots(1, lambda: None), len(log.events)
    slots.take()
    tools = Tools(log, slots, "w", 0, lambda _count: None)  # type: ignore[arg-type]
    deadline_ms = int(time.time() * 1000) + 60_000
    work = InferenceScheduled(
        RID, "acme", "m", "1", "batch", (), Sampling(), deadline_ms, 0, Reply("tokens.acme", 0), "s",
        inputs=INPUTS, parameters={"size": str(size)},
    )  # fmt: skip
    work = replace(work, **more)
    job = TensorModel(engine or Zeros()).job(tools, work, Attempt(1, 1), fresh_plan(work), (), fenced=False)
    async with asyncio.timeout(60):
        return await job.run(0.0), log.events[before:]


@pytest.mark.parametrize(("tier", "priority"), [("interactive", 0), ("batch", 1), ("shadow", 2), ("another", 3)])
async def test_the_engine_is_told_of_the_deadline_the_tier_and_the_tenant(log: Log, tier: str, priority: int) -> None:
    """triton#6055: what the queue goes by is the request's own, and so is what names its answer, if that may be shared."""
    engine, deadline_ms = Zeros(), int(time.time() * 1000) + 12_345
    told = {"tier": tier, "tenant": "globex", "deadline_ms": deadline_ms, "outputs": ("y",), "cache_key": "k"}
    for shared in (False, True):
        assert (await run(log, 3, engine, shared=shared, **told))[0] == "completed"
    wanted = TensorRequest(f"{RID}.1.1", INPUTS, ("y",), {"size": "3"}, deadline_ms, priority, "globex")
    assert engine.asked == [wanted, replace(wanted, shared="k")]


async def test_one_with_more_than_the_object_store_takes_fails_with_its_reason(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.log.INLINE_MAX_BYTES", 10_000)
    monkeypatch.setattr("infra.payloads.OBJECT_MAX_BYTES", 20_000)
    outcome, events = await run(log, 20_000)
    assert outcome == "answer_too_large"
    assert [type(event) for event in events] == [GenerationStarted, InferenceFailed]
    assert events[-1].reason == "answer_too_large"
    outcome, events = await run(log, 15_000)
    assert outcome == "completed"
    assert isinstance(events[-1], InferenceCompleted)


async def test_one_with_more_than_an_answer_may_have_fails_before_it_is_written(log: Log) -> None:
    outcome, events = await run(log, ANSWER_MAX_BYTES + 1)
    assert outcome == "answer_too_large"
    assert isinstance(events[-1], InferenceFailed)
    assert f"the outputs have {ANSWER_MAX_BYTES + 1} bytes" in events[-1].message
