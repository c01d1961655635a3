"""Engines on model files, and requests for them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from schemas.events import Tensor
from workers.engines.arrays import DTYPES, to_array, to_tensor
from workers.engines.onnx import OnnxEngine
from workers.engines.port import EngineConfig
from workers.engines.tensors import TensorRequest, TensorResult

DAY_MS = 86_400_000


@asynccontextmanager
async def serving(
    folder: Path, processor: str = "", context: int = 512, instances: int | None = 1, **args: Any
) -> AsyncIterator[OnnxEngine]:
    """An engine that runs; at the end nothing runs or waits in it. `instances` None says nothing of them."""
    told = args if instances is None else {"instances": instances} | args
    engine = OnnxEngine(EngineConfig("m", str(folder), context, 64, told), processor)
    await engine.start()
    try:
        yield engine
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    finally:
        await engine.shutdown()


def request(
    *inputs: Tensor, outputs: tuple[str, ...] = (), within_ms: float = DAY_MS, priority: int = 0, **parameters: Any
) -> TensorRequest:
    """One that must begin within a time from now. Some are made when tests are collected, which may be an hour before they run."""
    told = {name: str(value) for name, value in parameters.items()}
    return TensorRequest("k", inputs, outputs, told, int(time.time() * 1000 + within_ms), priority, "t")


def tensor(name: str, datatype: str, values: Any) -> Tensor:
    return to_tensor(name, datatype, np.array(values, dtype=DTYPES[datatype]))


def floats(*rows: Sequence[float]) -> Tensor:
    return tensor("x", "FP32", rows)


def array(result: TensorResult | BaseException, name: str = "y") -> Any:
    """An output's values."""
    assert isinstance(result, TensorResult), result
    return to_array(next(each for each in result.outputs if each.name == name))
