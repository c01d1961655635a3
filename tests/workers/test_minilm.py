"""MiniLM behind the engine: vectors are those of ONNX Runtime called directly, whatever shares their batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import pytest_asyncio

from infra.onnx_signature import public_signature, read_signature
from schemas.errors import HeadraceError
from schemas.events import Tensor, TensorSpec
from schemas.reasons import Reason
from tests.workers.onnx_site import array, request, serving, tensor
from text.tokenizer import HfTokenizer, load_tokenizer
from workers.engines.onnx import OnnxEngine
from workers.engines.onnx_session import Session

TEXTS = (
    "A cat sits on the mat.",
    "A feline rests upon a rug.",
    "The quarterly figures were published on Friday.",
    "Kafka leads requests to engines; " * 9,
    "short",
)


@pytest.fixture(scope="module")
def tokenizer(minilm_dir: Path) -> HfTokenizer:
    found = load_tokenizer(str(minilm_dir))
    assert isinstance(found, HfTokenizer)
    return found


@pytest.fixture(scope="module")
def ids(tokenizer: HfTokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(minilm_dir: Path, ids: list[list[int]]) -> Any:
    """Each text by itself, without padding: the mean of its tokens' vectors, of length 1."""
    session = onnxruntime.InferenceSession(minilm_dir / "model.onnx", providers=["CPUExecutionProvider"])
    rows = []
    for each in ids:
        row = np.array([each])
        (states,) = session.run(None, {"input_ids": row, "attention_mask": np.ones_like(row)})
        mean = states[0].mean(axis=0)
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


@pytest_asyncio.fixture(loop_scope="function")
async def engine(minilm_dir: Path) -> AsyncIterator[OnnxEngine]:
    async with serving(minilm_dir, "text-embedding", max_queue_delay_ms=30, max_batch_size=4) as found:
        yield found


def tokens(*rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    flat = [each for row in rows for each in row]
    return tensor("token_ids", "INT32", flat), tensor("lengths", "INT32", [len(row) for row in rows])


def test_tokens_are_neither_padded_nor_cut(tokenizer: HfTokenizer) -> None:
    assert tokenizer.encode("hello world", add_special_tokens=True) == [101, 7592, 2088, 102]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [7592, 2088]
    assert len(tokenizer.encode("word " * 300, add_special_tokens=True)) == 302
    assert tokenizer.token_bytes(7592) == b" hello"


async def test_vectors_are_those_of_each_text_alone(engine: OnnxEngine, ids: list[list[int]], expected: Any) -> None:
    whole = await engine.infer(request(*tokens(*ids)))
    assert array(whole, "embedding").shape == (len(TEXTS), 384)
    assert np.allclose(array(whole, "embedding"), expected, atol=1e-5)
    alone = await asyncio.gather(*(engine.infer(request(*tokens(each))) for each in ids))
    for result, wanted in zip(alone, expected, strict=True):
        assert np.allclose(array(result, "embedding"), wanted[None], atol=1e-5)
    assert max(result.batch for result in alone) > 1
    assert expected[0] @ expected[1] > 0.5 > expected[0] @ expected[2], "what means the same is near"


async def test_texts_between_two_buckets_run_together_and_are_padded_to_the_longest_of_them(
    minilm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a text is padded to, its vector is that of the text alone."""
    lengths = (3, 7, 8, 9, 12, 16, 17, 40, 8)
    texts = [list(range(2_000 + 100 * index, 2_000 + 100 * index + length)) for index, length in enumerate(lengths)]
    runs: list[dict[str, Any]] = []
    run = Session.run

    def watched(session: Session, feeds: Any, fetch: Any, options: Any) -> Any:
        runs.append({name: np.array(array) for name, array in feeds.items()})
        return run(session, feeds, fetch, options)

    monkeypatch.setattr(Session, "run", watched)
    async with serving(
        minilm_dir, "text-embedding", buckets=[8, 16], max_batch_size=32, max_queue_delay_ms=200
    ) as engine:
        whole = array(await engine.infer(request(*tokens(*texts))), "embedding")
        shapes = sorted(feeds["input_ids"].shape for feeds in runs)
        assert shapes == [(2, 40), (3, 16), (4, 8)]
        widths = sorted(width for feeds in runs for width in feeds["attention_mask"].sum(axis=1).tolist())
        assert widths == sorted(lengths)
        for feeds in runs:
            assert not feeds["input_ids"][feeds["attention_mask"] == 0].any()
        runs.clear()
        alone = [array(await engine.infer(request(*tokens(each))), "embedding")[0] for each in texts]
        assert [feeds["input_ids"].shape for feeds in runs] == [(1, length) for length in lengths]
    assert np.allclose(whole, np.stack(alone), atol=1e-5)


async def test_fewer_dimensions_are_cut_and_of_length_one(
    engine: OnnxEngine, ids: list[list[int]], expected: Any
) -> None:
    found = array(await engine.infer(request(*tokens(*ids), dimensions=16)), "embedding")
    cut = expected[:, :16]
    assert np.allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (request(*tokens([101, 102]), dimensions=385), "`dimensions` is 385; the model's vectors have 384"),
        (request(*tokens([101, 102]), dimensions=0), "`dimensions` must be a whole number above 0"),
        (request(*tokens([5] * 513)), "a text has 513 tokens; the model takes 512"),
        (request(tokens([1, 2])[0]), "`token_ids` and `lengths` must be given"),
        (request(tokens([1, 2])[0], tensor("lengths", "INT32", [1])), "add up to the 2 of"),
        (request(tokens([1, 2])[0], tensor("lengths", "INT32", [3, -1])), "at least 1 each"),
        (request(*tokens([101, 102]), outputs=("vector",)), "no output `vector`; it has embedding"),
    ],
)
async def test_what_it_does_not_take_is_refused_in_words(engine: OnnxEngine, asked: Any, told: str) -> None:
    with pytest.raises(HeadraceError, match=told) as refused:
        await engine.infer(asked)
    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_an_id_out_of_the_vocabulary_fails_alone(engine: OnnxEngine, ids: list[list[int]], expected: Any) -> None:
    bad, good = await asyncio.gather(
        engine.infer(request(*tokens([101, 99_999, 102]))),
        engine.infer(request(*tokens(ids[4]))),
        return_exceptions=True,
    )
    assert isinstance(bad, HeadraceError)
    assert "out of data bounds" in bad.message
    assert np.allclose(array(good, "embedding"), expected[4:], atol=1e-5)


async def test_pooling_and_length_are_the_models_settings(minilm_dir: Path, ids: list[list[int]]) -> None:
    session = onnxruntime.InferenceSession(minilm_dir / "model.onnx", providers=["CPUExecutionProvider"])
    row = np.array([ids[0]])
    (states,) = session.run(None, {"input_ids": row, "attention_mask": np.ones_like(row)})
    async with serving(minilm_dir, "text-embedding", pooling="cls", normalize=False) as engine:
        result = await engine.infer(request(*tokens(ids[0])))
    assert np.allclose(array(result, "embedding"), states[:, 0], atol=1e-5)


def test_its_signature(minilm_dir: Path) -> None:
    file = read_signature(minilm_dir)
    assert file.batched
    assert [spec.name for spec in file.inputs] == ["input_ids", "attention_mask"]
    assert public_signature("text-embedding", file) == (
        (
            TensorSpec("text", "BYTES", (-1,)),
            TensorSpec("token_ids", "INT32", (-1,)),
            TensorSpec("lengths", "INT32", (-1,)),
        ),
        (TensorSpec("embedding", "FP32", (-1, 384)),),
    )
