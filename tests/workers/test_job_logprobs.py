"""Log-probabilities of tokens that could not come travel in JSON too, or no reader could fold the stream."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator

import pytest

from schemas.codec import decode_json, encode_json
from schemas.events import Attempt, InferenceScheduled, Reply, Sampling, TokensGenerated
from tests.workers.test_answer import Broker
from text.tokenizer import ByteTokenizer
from workers.engines.port import EngineChunk, EngineConfig, EngineRequest, Scored
from workers.engines.scripted import ScriptedEngine
from workers.job import Tools
from workers.slots import Slots
from workers.token_job import LanguageModel, TokenJob
from workers.work import fresh_plan


class Masking(ScriptedEngine):
    """Masks tokens, as an engine does with `logprobs_mode: processed_logprobs` and a small `top_k`."""

    worst = -math.inf

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        async for chunk in super().generate(request):
            score = Scored(self.worst, ((1, -0.5), (2, self.worst)))
            yield dataclasses.replace(chunk, logprobs=(score,) * len(chunk.token_ids))


@pytest.mark.parametrize("worst", [-math.inf, math.nan, math.inf, -1e300])
async def test_all_that_is_written_is_json(worst: float) -> None:
    engine = Masking(EngineConfig("m", "scripted", 100, 1))
    engine.worst = worst
    broker, slots = Broker(0), Slots(1, lambda: None)
    slots.take()
    tools = Tools(broker, slots, "w", 0, lambda _count: None)  # type: ignore[arg-type]
    model = LanguageModel(engine, ByteTokenizer())
    sampling = Sampling(max_tokens=3, logprobs=2)
    work = InferenceScheduled(
        "r", "acme", "m", "1", "batch", tuple(b"abc"), sampling, 0, 0, Reply("tokens.acme", 0, "json"), "s"
    )
    assert await TokenJob(model, tools, work, Attempt(1, 1), fresh_plan(work), (), fenced=False).run(0.0) == "completed"
    assert [decode_json(encode_json(event)) for event in broker.events] == broker.events
    chunks = [event for event in broker.events if isinstance(event, TokensGenerated)]
    assert [score.logprob for chunk in chunks for score in chunk.logprobs or ()] == [-9999.0] * 3
