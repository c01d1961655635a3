"""Texts' labels, on a model made so that the sum of a text's tokens names its label."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import HeadraceError
from schemas.reasons import Reason
from tests.onnx_models import scoring
from tests.workers.onnx_site import array, request, serving, tensor

NAMES = ("bad", "so-so", "gut — très bien")
LIKELY = float(np.exp(4) / (np.exp(4) + 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    configure(scoring(tmp_path, len(NAMES)), id2label=dict(enumerate(NAMES)))
    return tmp_path


def configure(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def asked(*rows: list[int], **more: Any):
    flat = [each for row in rows for each in row]
    return request(tensor("token_ids", "INT32", flat), tensor("lengths", "INT32", [len(row) for row in rows]), **more)


async def test_labels_come_best_first_in_the_order_of_the_texts(folder: Path) -> None:
    rows = [[5] * 40, [1], [1, 1], [3, 4, 5], [1] * 9]
    async with serving(folder, "text-classification", max_queue_delay_ms=20, max_batch_size=2) as engine:
        whole = await engine.infer(asked(*rows))
        alone = await asyncio.gather(*(engine.infer(asked(row)) for row in rows))
    best = [NAMES[sum(row) % 3] for row in rows]
    assert array(whole, "label")[:, 0].tolist() == best
    assert np.allclose(array(whole, "score")[:, 0], LIKELY, atol=1e-5)
    assert np.allclose(array(whole, "score").sum(axis=1), 1, atol=1e-5)
    assert [array(each, "label")[0, 0] for each in alone] == best


async def test_as_many_labels_come_as_are_asked_for(folder: Path) -> None:
    async with serving(folder, "text-classification") as engine:
        found = await engine.infer(asked([1], [2], top_k=2, outputs=("label",)))
        assert array(found, "label").tolist() == [["so-so", "bad"], ["gut — très bien", "bad"]]
        assert [each.name for each in found.outputs] == ["label"]
        with pytest.raises(HeadraceError, match="`top_k` must be a whole number above 0, not '-1'"):
            await engine.infer(asked([1], top_k=-1))


async def test_where_a_text_may_have_several_each_score_stands_for_itself(folder: Path) -> None:
    configure(folder, id2label=dict(enumerate(NAMES)), problem_type="multi_label_classification")
    async with serving(folder, "text-classification") as engine:
        found = await engine.infer(asked([1]))
    assert np.allclose(array(found, "score"), [[1 / (1 + np.exp(-4)), 0.5, 0.5]], atol=1e-5)


@pytest.mark.parametrize(
    ("problem_type", "score"),
    [(None, 1 / (1 + np.exp(-4))), ("single_label_classification", 1 / (1 + np.exp(-4))), ("regression", 4)],
)
async def test_the_one_label_of_a_model_has_no_certain_score(
    tmp_path: Path, problem_type: str | None, score: float
) -> None:
    """A softmax over one label is always 1: what ranks by such a model would get nothing of it."""
    configure(scoring(tmp_path, 1), id2label={"0": "relevant"}, problem_type=problem_type)
    async with serving(tmp_path, "text-classification") as engine:
        found = await engine.infer(asked([1]))
    assert array(found, "label").tolist() == [["relevant"]]
    assert np.allclose(array(found, "score"), [[score]], atol=1e-5)


class TestPadding:
    """With a token that names another label, which only a mask hides."""

    ROWS = ([5] * 7, [3, 4, 5], [2] * 7, [1, 1, 1], [2, 2])

    @staticmethod
    def folder(tmp_path: Path, **more: Any) -> Path:
        configure(scoring(tmp_path, len(NAMES), **more), id2label=dict(enumerate(NAMES)), pad_token_id=1)
        return tmp_path

    @staticmethod
    async def batches(folder: Path, rows: Sequence[list[int]]) -> list[int]:
        """With how many others each ran that came together; every one has its own label, as it has by itself and in one request."""
        async with serving(folder, "text-classification", max_queue_delay_ms=100) as engine:
            together = await asyncio.gather(*(engine.infer(asked(row)) for row in rows))
            alone = [await engine.infer(asked(row)) for row in rows]
            whole = await engine.infer(asked(*rows))
        best = [NAMES[sum(row) % 3] for row in rows]
        for found in (together, alone):
            assert [array(each, "label")[0, 0] for each in found] == best
        assert array(whole, "label")[:, 0].tolist() == best
        return [found.batch for found in together]

    async def test_texts_of_a_bucket_share_a_batch_where_a_mask_hides_it(self, tmp_path: Path) -> None:
        assert await self.batches(self.folder(tmp_path), self.ROWS) == [5] * 5

    async def test_without_a_mask_none_is_padded_and_only_equal_lengths_share_a_batch(self, tmp_path: Path) -> None:
        assert await self.batches(self.folder(tmp_path, masked=False), self.ROWS) == [2, 2, 2, 2, 1]

    async def test_all_are_padded_to_a_fixed_length_and_longer_ones_refused(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, length=8)
        assert await self.batches(folder, [*self.ROWS, [3] * 8]) == [6] * 6
        await self.refused(folder, [1] * 9, "a text has 9 tokens; the model takes 8")

    async def test_only_a_fixed_length_is_taken_without_a_mask(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, masked=False, length=3)
        assert await self.batches(folder, [[1, 2, 4], [3, 3, 3], [2, 3, 3]]) == [3] * 3
        for row in ([1, 1], [1] * 4):
            await self.refused(folder, row, f"a text has {len(row)} tokens; the model takes 3")

    @staticmethod
    async def refused(folder: Path, row: list[int], words: str) -> None:
        async with serving(folder, "text-classification") as engine:
            with pytest.raises(HeadraceError, match=words) as told:
                await engine.infer(asked(row))
        assert told.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "names no labels"),
        ({"id2label": {"0": "a", "2": "b"}}, "has no label '1'"),
        ({"id2label": {"0": "a"}}, "gives 3 scores, and config.json names 1 labels"),
    ],
)
async def test_labels_that_do_not_fit_are_refused(folder: Path, config: dict[str, Any], told: str) -> None:
    configure(folder, **config)
    with pytest.raises(HeadraceError, match=told):
        async with serving(folder, "text-classification"):
            pass


async def test_a_configuration_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(HeadraceError, match=r"config\.json can't be read"):
        async with serving(folder, "text-classification"):
            pass
