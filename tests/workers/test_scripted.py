"""The scripted engine follows its script."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import HeadraceError
from schemas.events import Sampling
from workers.engines.port import EngineChunk, EngineConfig, EngineError, EngineRequest
from workers.engines.scripted import EOS, ScriptedEngine

PLAIN = Sampling(max_tokens=1_000)


async def chunks(prompt: Any, sampling: Sampling = PLAIN, accepted: bytes = b"") -> list[EngineChunk]:
    engine = ScriptedEngine(EngineConfig("m", "scripted", 10_000, 4))
    text = prompt if isinstance(prompt, bytes) else json.dumps(prompt).encode()
    async with aclosing(engine.generate(EngineRequest("r", tuple(text + accepted), sampling, len(accepted)))) as stream:
        return [chunk async for chunk in stream]


async def made(prompt: Any, sampling: Sampling = PLAIN, accepted: bytes = b"") -> list[int]:
    return [token for chunk in await chunks(prompt, sampling, accepted) for token in chunk.token_ids]


async def test_text_is_echoed_byte_by_byte() -> None:
    found = await chunks("é".encode())
    assert [chunk.token_ids for chunk in found] == [(0xC3,), (0xA9,), (EOS,)]
    assert [chunk.finished for chunk in found] == [False, False, True]


@pytest.mark.parametrize("prompt", [b"[1]", b"{broken", b"{", b"7", b"\xff"])
async def test_what_is_no_object_is_echoed(prompt: bytes) -> None:
    assert bytes((await made(prompt))[:-1]) == prompt


async def test_listed_tokens_come_as_one_chunk_each() -> None:
    found = await chunks({"tokens": ["DEF", "", "G"], "repeat": 2})
    assert [bytes(chunk.token_ids) for chunk in found[:-1]] == [b"DEF", b"G"] * 2


async def test_hex_is_raw_bytes() -> None:
    assert bytes((await made({"hex": ["f09f", "98"]}))[:-1]) == b"\xf0\x9f\x98"


async def test_a_nonce_differs_each_time() -> None:
    assert await made({"nonce": True}) != await made({"nonce": True})


@given(k=st.integers(0, 12))
async def test_it_continues_at_any_token(k: int) -> None:
    script = {"tokens": ["ab", "cde", "f"], "repeat": 2}
    whole = await made(script)
    assert await made(script, Sampling(max_tokens=1_000 - k), bytes(whole[:k])) == whole[k:]


async def test_max_tokens_cuts_a_chunk() -> None:
    found = await chunks({"tokens": ["abc"], "repeat": 5}, Sampling(max_tokens=4))
    assert [bytes(chunk.token_ids) for chunk in found] == [b"abc", b"a"]
    assert found[-1].finished


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=10, ignore_eos=True),
        Sampling(max_tokens=10, min_tokens=10),
        Sampling(max_tokens=10, ignore_eos=True, min_tokens=5),
    ],
)
@pytest.mark.parametrize("prompt", [b"abc", b"", {"tokens": []}, {"repeat": 0, "tokens": ["a"]}])
async def test_an_answer_that_must_not_end_begins_again(prompt: Any, sampling: Sampling) -> None:
    assert len(await made(prompt, sampling)) == 10


async def test_it_fails_after_its_tokens() -> None:
    with pytest.raises(EngineError):
        await made({"raise": "error"})
    engine = ScriptedEngine(EngineConfig("m", "scripted", 10_000, 4))
    seen = []
    with pytest.raises(EngineError):
        async with aclosing(
            engine.generate(EngineRequest("r", tuple(b'{"tokens": ["a"], "raise": "error"}'), PLAIN))
        ) as stream:
            async for chunk in stream:
                seen += [bytes(chunk.token_ids)]
    assert seen == [b"a"]
    assert engine.stats().running == 0


@pytest.mark.parametrize(
    "script", [{"tokens": 5}, {"tokens": [5]}, {"hex": ["zz"]}, {"repeat": "many"}, {"token_ms": []}]
)
async def test_a_script_that_makes_no_sense_fails_alone(script: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        await made(script)


async def test_it_waits_as_told() -> None:
    began = time.monotonic()
    await made({"tokens": ["a", "b"], "first_token_ms": 20, "token_ms": 20, "sleep_ms": 20})
    assert time.monotonic() - began >= 0.06


def test_unknown_engine_arguments_are_refused() -> None:
    with pytest.raises(HeadraceError, match="dtype"):
        ScriptedEngine(EngineConfig("m", "scripted", 10, 1, {"dtype": "float32"}))
