"""Tensor models for tests of the front door, and what they compute: a worker's part, without a worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from decisions.signature import BYTES_CLASSIFICATION
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, ModelVersionRegistered
from schemas.parts import Tensor, TensorSpec
from schemas.reasons import Reason
from schemas.tensors import DATATYPES, pack, unpack

SUM, FAILS, HANGS, RANKS, FILES = "tensor-sum", "tensor-fails", "tensor-hangs", "tensor-ranks", "tensor-files"
ADD = "tensor-add"
"""As `SUM`, and the rows of several callers are put together."""
RANKS_MAX = 4
FAULT = "the model's own words: 3 times 4 is not 5"


def identity(datatype: str) -> str:
    """The model that gives `x` of a datatype back as `y`."""
    return f"tensor-identity-{datatype.lower()}"


def back(datatype: str) -> str:
    """The model that gives inputs of a datatype back: `x0` without a dimension, `x1` with one, up to `RANKS_MAX`."""
    return f"tensor-back-{datatype.lower()}"


def tensor_models(version: str) -> list[ModelVersionRegistered]:
    """All of them, as they are registered."""

    def model(
        name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], processor: str = ""
    ) -> ModelVersionRegistered:
        return ModelVersionRegistered(
            name, version, "onnx", "", 4096, created_ms=1, processor=processor, inputs=inputs, outputs=outputs
        )

    def spec(name: str, datatype: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, datatype, shape)

    def ranks(datatype: str) -> tuple[TensorSpec, ...]:
        return tuple(spec(f"x{rank}", datatype, *[-1] * rank) for rank in range(RANKS_MAX + 1))

    one = (spec("x", "FP32", 1, 5),), (spec("y", "FP32", 1, 5),)
    return [
        *(model(identity(kind), (spec("x", kind, -1, -1),), (spec("y", kind, -1, -1),)) for kind in DATATYPES),
        *(model(back(kind), ranks(kind), ranks(kind)) for kind in DATATYPES),
        model(SUM, (spec("a", "FP32", -1, 3), spec("b", "FP32", -1, 3)), (spec("total", "FP32", -1, 3), spec("rows", "INT64", 1))),
        replace(model(ADD, (spec("a", "FP32", -1, 3), spec("b", "FP32", -1, 3)), (spec("total", "FP32", -1, 3),)), batched=True, engine_args='{"max_batch_size": 1}'),
        model(FAILS, *one),
        model(HANGS, *one),
        model(RANKS, (spec("scalar", "INT8"), spec("cube", "INT8", 2, -1, 2)), (spec("scalar", "INT8"), spec("cube", "INT8", 2, -1, 2))),
        model(FILES, (spec("bytes", "BYTES", -1),), (spec("label", "BYTES", -1, -1), spec("score", "FP32", -1, -1)), BYTES_CLASSIFICATION),
    ]  # fmt: skip


async def computed(request: InferenceRequested) -> tuple[Tensor, ...]:
    """The outputs that are wanted. Raises HeadraceError, and never ends, where the model does."""
    inputs = {tensor.name: tensor for tensor in request.inputs or ()}
    if request.model == FAILS:
        raise HeadraceError(Reason.ENGINE_ERROR, FAULT)
    if request.model == HANGS:
        await asyncio.sleep(3600)
    outputs = [tensor for tensor in _outputs(request, inputs) if not request.outputs or tensor.name in request.outputs]
    return tuple(outputs)


def _outputs(request: InferenceRequested, inputs: dict[str, Tensor]) -> list[Tensor]:
    if request.model in (SUM, ADD):
        a, b = (np.frombuffer(inputs[name].data, "<f4") for name in "ab")
        rows = np.array([inputs["a"].shape[0]], "<i8")
        counted = [Tensor("rows", "INT64", (1,), rows.tobytes())] if request.model == SUM else []
        with np.errstate(all="ignore"):  # callers may send any numbers
            total = a + b
        return [*counted, Tensor("total", "FP32", inputs["a"].shape, total.tobytes())]
    if request.model == FILES:
        kept = int(request.parameters.get("top_k", "2"))
        files = [[b"long" if len(file) > 3 else b"short", b"\xff any"][:kept] for file in unpack(inputs["bytes"].data)]
        labels = pack(label for row in files for label in row)
        scores = np.array([[0.75, 0.25][:kept] for _ in files], "<f4").tobytes()
        shape = (len(files), kept)
        return [Tensor("label", "BYTES", shape, labels), Tensor("score", "FP32", shape, scores)]
    names = {"x": "y"}
    return [Tensor(names.get(t.name, t.name), t.datatype, t.shape, t.data) for t in inputs.values()]
