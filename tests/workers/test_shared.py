"""Equal requests that run at once have one generation; nobody waits for another's reader; it ends when the last one leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from schemas.events import Sampling
from workers.engines import shared
from workers.engines.port import EngineChunk, EngineConfig, EngineDead, EngineError, EngineRequest
from workers.engines.scripted import ScriptedEngine
from workers.engines.shared import SharedEngine

GREEDY = Sampling(max_tokens=200, temperature=0.0)


class Counted(ScriptedEngine):
    """Counts what it is asked to generate."""

    def __init__(self) -> None:
        super().__init__(EngineConfig("m", "scripted", 4_096, 8))
        self.keys: list[str] = []
        self.dead = False

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        self.keys.append(request.key)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                if self.dead:
                    raise EngineDead("gone")
                yield chunk


class Bench:
    def __init__(self) -> None:
        self.inner = Counted()
        self.engine = SharedEngine(self.inner)
        self.asked = 0

    def request(
        self,
        *,
        sampling: Sampling = GREEDY,
        salt: str = "salt",
        own: bool = False,
        answer: str = "a",
        token_ms: int = 5,
        failure: str = "",
    ) -> EngineRequest:
        self.asked += 1
        script = {"tokens": list("abcdefgh"), "token_ms": token_ms} | ({"raise": failure} if failure else {})
        prompt = tuple(json.dumps(script).encode())
        return EngineRequest(f"r{self.asked}", prompt, sampling, 0, salt, shared="" if own else answer)

    async def read(self, request: EngineRequest) -> tuple[int, ...]:
        async with aclosing(self.engine.generate(request)) as chunks:
            return tuple([token async for chunk in chunks for token in chunk.token_ids])

    async def until_idle(self) -> None:
        async with asyncio.timeout(5):
            while self.engine.stats().running:  # noqa: ASYNC110  # an engine tells nobody
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


WHOLE = (*b"abcdefgh", 256)


async def test_equal_requests_are_generated_once_and_all_read_all_of_it(bench: Bench) -> None:
    first = asyncio.create_task(bench.read(bench.request()))
    await asyncio.sleep(0.02)
    late = [asyncio.create_task(bench.read(bench.request())) for _ in range(19)]
    assert await asyncio.gather(first, *late) == [WHOLE] * 20
    assert len(bench.inner.keys) == 1
    assert await bench.read(bench.request()) == WHOLE, "one that comes right after the end has it, too"
    assert len(bench.inner.keys) == 1


async def test_what_differs_or_may_not_be_shared_is_generated_apart(bench: Bench) -> None:
    asked = [
        bench.request(),
        bench.request(salt="other"),
        bench.request(sampling=replace(GREEDY, seed=1)),
        bench.request(sampling=replace(GREEDY, max_tokens=199)),
        bench.request(sampling=replace(GREEDY, stop=("x",))),
        replace(bench.request(), continued=1),
        bench.request(answer="b"),
        bench.request(own=True),
        bench.request(own=True),
    ]
    await asyncio.gather(*(bench.read(request) for request in asked))
    assert len(bench.inner.keys) == len(asked)


async def test_a_reader_that_lags_holds_nobody_up(bench: Bench) -> None:
    async with aclosing(bench.engine.generate(bench.request())) as slow:
        begun = await anext(slow)
        async with asyncio.timeout(5):
            assert await bench.read(bench.request()) == WHOLE
        rest = [token async for chunk in slow for token in chunk.token_ids]
    assert (*begun.token_ids, *rest) == WHOLE
    assert len(bench.inner.keys) == 1


@pytest.mark.parametrize("by_abort", [True, False])
async def test_it_goes_on_while_anybody_reads_and_ends_with_the_last(bench: Bench, by_abort: bool) -> None:
    requests = [bench.request(token_ms=20) for _ in range(3)]
    tasks = [asyncio.create_task(bench.read(request)) for request in requests]

    async def leave(number: int) -> None:
        if by_abort:
            await bench.engine.abort(requests[number].key)
        else:
            tasks[number].cancel()
        await asyncio.wait({tasks[number]}, timeout=1)
        assert tasks[number].done()

    await asyncio.sleep(0.05)
    await leave(0)
    await leave(1)
    assert bench.engine.stats().running == 1
    await leave(2)
    await bench.until_idle()
    assert await bench.read(bench.request(token_ms=20)) == WHOLE
    assert len(bench.inner.keys) == 2, "what was broken off is nobody's answer"


async def test_the_first_may_leave_and_the_second_goes_on(bench: Bench) -> None:
    first, second = (asyncio.create_task(bench.read(bench.request(token_ms=20))) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    assert await second == WHOLE


async def test_a_failure_reaches_all_and_is_not_kept(bench: Bench) -> None:
    asked = [bench.request(failure="error") for _ in range(3)]
    found = await asyncio.gather(*(bench.read(request) for request in asked), return_exceptions=True)
    assert [type(error) for error in found] == [EngineError] * 3
    assert len({id(error) for error in found}) == 3
    with pytest.raises(EngineError):
        await bench.read(bench.request(failure="error"))
    assert len(bench.inner.keys) == 2


async def test_a_dead_engine_is_told_as_such(bench: Bench) -> None:
    tasks = [asyncio.create_task(bench.read(bench.request(token_ms=20))) for _ in range(2)]
    await asyncio.sleep(0.03)
    bench.inner.dead = True
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in found] == [EngineDead] * 2


async def test_a_key_is_used_by_one_at_a_time(bench: Bench) -> None:
    request = bench.request()
    first = asyncio.create_task(bench.read(request))
    await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="running already"):
        await bench.read(request)
    assert await first == WHOLE
    assert await bench.read(request) == WHOLE


async def test_what_is_kept_is_forgotten_soon_and_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "KEPT_MS", 50)
    await bench.read(bench.request())
    await asyncio.sleep(0.1)
    await bench.read(bench.request())
    assert len(bench.inner.keys) == 2
    monkeypatch.setattr(shared, "KEPT_MS", 60_000)
    monkeypatch.setattr(shared, "KEPT_MAX", 2)
    for number in (1, 2, 3, 2, 3, 1):
        await bench.read(bench.request(salt=str(number), token_ms=0))
    assert len(bench.inner.keys) == 2 + 4
    monkeypatch.setattr(shared, "KEPT_TOKENS_MAX", 2 * len(WHOLE) - 1)
    for number in (4, 5, 5, 4):
        await bench.read(bench.request(salt=str(number), token_ms=0))
    assert len(bench.inner.keys) == 2 + 4 + 3
    await bench.engine.shutdown()


async def test_it_ends_with_the_engine(bench: Bench) -> None:
    task = asyncio.create_task(bench.read(bench.request(token_ms=1_000)))
    await asyncio.sleep(0.02)
    await bench.engine.shutdown()
    async with asyncio.timeout(2):
        await task
    await bench.until_idle()
