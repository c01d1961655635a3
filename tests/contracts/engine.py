"""What every engine does: one class of tests, run on the scripted engine and on vLLM. Who runs it gives a fixture `bench`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from schemas.events import Sampling
from text.tokenizer import Tokenizer
from workers.engines.port import Engine, EngineChunk, EngineError, EngineRequest

CONTEXT = 1024
SLOTS = 8
WAIT_S = 60.0
PROMPT = "The headrace leads water to the turbine, and the turbine"
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)


@dataclass
class Bench:
    """An engine that runs, of context CONTEXT and with SLOTS, and its tokenizer."""

    engine: Engine
    tokenizer: Tokenizer
    runs: int = 0
    shared: bool = False

    def request(self, sampling: Sampling = GREEDY, text: str = PROMPT, accepted: tuple[int, ...] = ()) -> EngineRequest:
        self.runs += 1
        prompt = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        key = f"contract-{self.runs}"
        return EngineRequest(
            key, prompt + accepted, sampling, len(accepted), "salt", shared="answer" if self.shared else ""
        )

    async def chunks(self, request: EngineRequest) -> list[EngineChunk]:
        async with asyncio.timeout(WAIT_S), aclosing(self.engine.generate(request)) as stream:
            return [chunk async for chunk in stream]

    async def ids(self, request: EngineRequest) -> tuple[int, ...]:
        return tuple(token for chunk in await self.chunks(request) for token in chunk.token_ids)

    async def until_idle(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.engine.stats().running:  # noqa: ASYNC110  # an engine tells nobody
                await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="class")
class EngineContract:
    """See the module."""

    async def test_it_makes_max_tokens_and_says_once_that_it_is_done(self, bench: Bench) -> None:
        chunks = await bench.chunks(bench.request())
        assert sum(len(chunk.token_ids) for chunk in chunks) == 24
        assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(0 <= token < bench.engine.vocab_size for chunk in chunks for token in chunk.token_ids)
        assert bench.engine.context_length == CONTEXT

    @pytest.mark.parametrize("k", [1, 7, 23])
    async def test_it_continues_at_any_token(self, bench: Bench, k: int) -> None:
        whole = await bench.ids(bench.request())
        rest = await bench.ids(bench.request(replace(GREEDY, max_tokens=24 - k), accepted=whole[:k]))
        assert rest == whole[k:]

    @pytest.mark.parametrize("wanted", [None, 0, 3])
    async def test_log_probabilities_come_one_a_token_when_asked_for(self, bench: Bench, wanted: int | None) -> None:
        for chunk in await bench.chunks(bench.request(replace(GREEDY, logprobs=wanted))):
            if wanted is None:
                assert chunk.logprobs is None
                continue
            assert chunk.logprobs is not None
            assert len(chunk.logprobs) == len(chunk.token_ids)
            for token, scored in zip(chunk.token_ids, chunk.logprobs, strict=True):
                assert scored.logprob <= 0
                assert len(scored.top) == wanted
                assert [each[1] for each in scored.top] == sorted((each[1] for each in scored.top), reverse=True)
                assert not wanted or scored.top[0][0] == token

    async def test_an_abort_ends_the_iterator_and_frees_its_place(self, bench: Bench) -> None:
        request = bench.request(replace(GREEDY, max_tokens=400))
        running = asyncio.create_task(bench.chunks(request))
        await asyncio.sleep(0.1)
        await bench.engine.abort(request.key)
        assert sum(len(chunk.token_ids) for chunk in await running) < 400
        await bench.until_idle()

    async def test_closing_the_iterator_aborts(self, bench: Bench) -> None:
        async with aclosing(bench.engine.generate(bench.request(replace(GREEDY, max_tokens=400)))) as stream:
            await anext(stream)
        await bench.until_idle()

    async def test_cancelling_the_reader_aborts(self, bench: Bench) -> None:
        running = asyncio.create_task(bench.chunks(bench.request(replace(GREEDY, max_tokens=400))))
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bench.until_idle()

    async def test_an_abort_of_nothing_changes_nothing(self, bench: Bench) -> None:
        await bench.engine.abort("nobody")
        assert len(await bench.ids(bench.request())) == 24

    async def test_neighbours_do_not_mix(self, bench: Bench) -> None:
        texts = [f"{PROMPT} number {i}" for i in range(SLOTS)]
        alone = [await bench.ids(bench.request(text=text)) for text in texts[:2]]
        together = await asyncio.gather(*(bench.ids(bench.request(text=text)) for text in texts))
        assert together[:2] == alone
        assert all(len(ids) == 24 for ids in together)

    async def test_a_request_that_fails_leaves_its_neighbour_alone(self, bench: Bench) -> None:
        alone = await bench.ids(bench.request())
        bad = bench.request(text="word " * CONTEXT)

        async def fails() -> None:
            with pytest.raises(EngineError):
                await bench.chunks(bad)

        ids, _ = await asyncio.gather(bench.ids(bench.request()), fails())
        assert ids == alone
        assert await bench.ids(bench.request()) == alone

    async def test_an_answer_has_its_minimum_length(self, bench: Bench) -> None:
        assert len(await bench.ids(bench.request(Sampling(max_tokens=80, min_tokens=70, temperature=0.0)))) >= 70

    async def test_an_engine_is_one(self, bench: Bench) -> None:
        assert isinstance(bench.engine, Engine)
        stats: Any = bench.engine.stats()
        assert stats.kv_cache_use is None or 0 <= stats.kv_cache_use <= 1
