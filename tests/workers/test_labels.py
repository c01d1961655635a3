"""Labels with scores: the best first, and what the model wasn't asked before the others."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schemas.tensors import strings
from workers.engines.arrays import to_array
from workers.engines.tensors import TensorRequest
from workers.processors.labels import Labels

NAMES = ("cat", "dog\0", "a bird", "empty")


def asked(**parameters: str) -> TensorRequest:
    return TensorRequest("k", (), (), parameters, int(time.time() * 1000) + 60_000, 0, "t")


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=len(NAMES), max_size=len(NAMES)), max_size=6),
    named=st.dictionaries(st.integers(0, 5), st.sampled_from(["empty", "txt"])),
    count=st.integers(1, 9),
)
def test_each_row_has_its_labels_best_first(rows: list[list[int]], named: dict[int, str], count: int) -> None:
    named = {row: name for row, name in named.items() if row < len(rows)}
    scores = np.array(rows, np.float32).reshape(len(rows), len(NAMES))
    label, score = Labels(NAMES).ranked(scores, asked(top_k=str(count)), named)
    kept = min(count, len(NAMES))
    assert label.shape == score.shape == (len(rows), kept)
    told = strings(label)
    values = to_array(score).tolist()
    for row, given_ in enumerate(rows):
        found = told[row * kept : (row + 1) * kept]
        if row in named:
            others = [name for name in NAMES if name != named[row]]
            assert found == [named[row], *others][:kept]
            assert values[row] == [1, *[0] * (kept - 1)]
        else:
            best = sorted(range(len(NAMES)), key=lambda i: (-given_[i], i))[:kept]
            assert found == [NAMES[i] for i in best]
            assert values[row] == [given_[i] for i in best]
