"""A model whose rows differ by what shares their batch is found when it is loaded, and runs each by itself; all others run together."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.onnx_models import ONNX_TYPES, counting_rows, drawing, identity, looping, picking, quantising
from tests.workers.onnx_site import array, floats, request, serving
from workers.engines import company
from workers.engines.company import differs_in_company
from workers.engines.onnx_session import Session

FINE, COARSE = [0.25, 0.5], [1_000.0, -1_000.0]


async def asked(folder: Path, **args: Any) -> list[Any]:
    """What two callers at once get of `quantising`."""
    async with serving(folder, max_queue_delay_ms=50, **args) as engine:
        return await asyncio.gather(*(engine.infer(request(floats(row))) for row in (FINE, COARSE)))


async def test_rows_that_differ_by_what_shares_their_batch_run_by_themselves(tmp_path: Path) -> None:
    fine, coarse = await asked(quantising(tmp_path))
    assert (fine.batch, coarse.batch) == (1, 1)
    assert np.allclose(array(fine), [FINE], atol=0.002)


async def test_so_do_the_rows_of_one_request(tmp_path: Path) -> None:
    async with serving(quantising(tmp_path)) as engine:
        found = await engine.infer(request(floats(FINE, COARSE)))
    assert np.allclose(array(found)[0], FINE, atol=0.002)


async def test_who_says_how_large_a_batch_may_be_gets_batches(tmp_path: Path) -> None:
    fine, coarse = await asked(quantising(tmp_path), max_batch_size=2)
    assert (fine.batch, coarse.batch) == (2, 2)
    assert not np.allclose(array(fine), [FINE], atol=0.1)


@pytest.mark.parametrize("datatype", ONNX_TYPES)
def test_a_model_of_any_datatype_whose_rows_stand_alone_is_not_found(tmp_path: Path, datatype: str) -> None:
    """Whether it can be tried or not."""
    assert not differs_in_company(Session(identity(tmp_path, datatype, ("n", "a", 3)), 1))


@pytest.mark.parametrize("make", [picking, lambda folder: counting_rows(folder, None)], ids=["picking", "counting"])
def test_nor_one_that_looks_things_up_nor_one_whose_rows_cannot_be_told_apart(tmp_path: Path, make: Any) -> None:
    assert not differs_in_company(Session(make(tmp_path), 1))


def test_nor_one_that_draws_at_random_which_is_never_the_same(tmp_path: Path) -> None:
    assert not differs_in_company(Session(drawing(tmp_path), 1))


def test_minilm_is_not_found_and_magika_is(minilm_dir: Path, magika_dir: Path) -> None:
    assert (differs_in_company(Session(minilm_dir, 1)), differs_in_company(Session(magika_dir, 1))) == (False, True)


def test_a_model_that_does_not_end_on_it_is_loaded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(company, "LIMIT_S", 0.1)
    monkeypatch.setattr(company, "_made_up", lambda _inputs: {"turns": np.full((company.ROWS, 1), 1 << 62)})
    begun_s = time.monotonic()
    assert not differs_in_company(Session(looping(tmp_path), 1))
    assert time.monotonic() - begun_s < 10
