"""The scripted engine does what every engine does. vLLM's turn is in `tests/system/test_vllm.py`, where its worker runs anyway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contracts.engine import CONTEXT, SLOTS, Bench, EngineContract
from text.tokenizer import load_tokenizer
from workers.engines.port import Engine, EngineConfig
from workers.engines.scripted import ScriptedEngine
from workers.engines.shared import SharedEngine


@pytest_asyncio.fixture(loop_scope="class", params=[None, False, True], ids=["itself", "wrapped", "shared"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """By itself, and inside the engine that shares generations: for requests that may not be shared, and for those that may."""
    engine: Engine = ScriptedEngine(EngineConfig("m", "scripted", CONTEXT, SLOTS, {"token_ms": 2}))
    if request.param is not None:
        engine = SharedEngine(engine)
    await engine.start()
    yield Bench(engine, load_tokenizer("bytes"), shared=bool(request.param))
    await engine.shutdown()
    await engine.shutdown()


class TestScripted(EngineContract):
    """It does what every engine does."""
