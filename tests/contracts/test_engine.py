"""The scripted engine does what every engine does. vLLM's turn is in `tests/system/test_vllm.py`, where its worker runs anyway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.contracts.engine import CONTEXT, SLOTS, Bench, EngineContract
from text.tokenizer import load_tokenizer
from workers.engines.port import EngineConfig
from workers.engines.scripted import ScriptedEngine


@pytest_asyncio.fixture(loop_scope="class")
async def bench() -> AsyncIterator[Bench]:
    engine = ScriptedEngine(EngineConfig("m", "scripted", CONTEXT, SLOTS, {"token_ms": 2}))
    await engine.start()
    yield Bench(engine, load_tokenizer("bytes"))
    await engine.shutdown()
    await engine.shutdown()


class TestScripted(EngineContract):
    """It does what every engine does."""
