"""How a text's vector comes of its tokens', whatever it is padded to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.onnx_args import POOLINGS
from tests.onnx_models import embedding
from tests.workers.onnx_site import array, request, serving
from tests.workers.test_minilm import tokens

TABLE = np.random.default_rng(7).standard_normal((32, 5)).astype(np.float32)
TABLE[0] = 99.0
"""Of the token that pads: seen by none."""
TEXTS = [[3, 9, 4, 31, 8, 8], [5], [7, 2, 30], [11, 12, 13, 14, 15, 16, 17]]
EXPECTED: dict[str, Callable[[Any], Any]] = {
    "mean": lambda rows: rows.mean(axis=0),
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.max(axis=0),
    "last": lambda rows: rows[-1],
}


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("pooling", POOLINGS)
async def test_a_vector_is_pooled_of_the_texts_own_tokens(tmp_path: Path, pooling: str, masked: bool) -> None:
    folder = embedding(tmp_path, TABLE, masked=masked)
    async with serving(folder, "text-embedding", pooling=pooling, normalize=False, buckets=[8]) as engine:
        result = await engine.infer(request(*tokens(*TEXTS)))
    assert result.batch == (len(TEXTS) if masked else 1)
    wanted = np.stack([EXPECTED[pooling](TABLE[text]) for text in TEXTS])
    found = array(result, "embedding")
    if pooling == "mean":
        assert np.allclose(found, wanted, atol=1e-6)
    else:
        assert np.array_equal(found, wanted)


async def test_a_file_that_pools_by_itself_gives_its_own_vectors(tmp_path: Path) -> None:
    folder = embedding(tmp_path, TABLE, pooled=True)
    async with serving(folder, "text-embedding", normalize=False) as engine:
        found = array(await engine.infer(request(*tokens(TEXTS[0]))), "embedding")
    assert np.allclose(found, [TABLE[TEXTS[0]].mean(axis=0)], atol=1e-6)
