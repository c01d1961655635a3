"""Three made-up small models: what is registered of them, and what they answer. An answer can be told from its input alone."""

from __future__ import annotations

import math
import struct

from decisions.signature import BYTES_CLASSIFICATION, EMBEDDING, TEXT_CLASSIFICATION, int32
from schemas.events import InferenceRequested, ModelVersionRegistered, Tensor, TensorSpec
from schemas.tensors import pack, unpack

SIZE = 4
UNBOUNDED = "no numbers"
"""A text whose embedding and scores aren't finite."""
LABELS = ("short", "middling", "long")
_TEXTS = (TensorSpec("text", "BYTES", (-1,)), TensorSpec("token_ids", "INT32", (-1,)), TensorSpec("lengths", "INT32", (-1,)))  # fmt: skip
_CLASSES = (TensorSpec("label", "BYTES", (-1, -1)), TensorSpec("score", "FP32", (-1, -1)))


def _version(model: str, processor: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> ModelVersionRegistered:  # fmt: skip
    return ModelVersionRegistered(
        model, "v1", "onnx", "", 64, processor=processor, inputs=inputs, outputs=outputs, batched=True
    )


def small_versions(prefix: str) -> tuple[ModelVersionRegistered, ...]:
    """An embedder, a classifier of texts, and one of bytes."""
    return (
        _version(f"{prefix}-embed", EMBEDDING, _TEXTS, (TensorSpec("embedding", "FP32", (-1, SIZE)),)),
        _version(f"{prefix}-classify", TEXT_CLASSIFICATION, _TEXTS, _CLASSES),
        _version(f"{prefix}-bytes", BYTES_CLASSIFICATION, (TensorSpec("bytes", "BYTES", (-1,)),), _CLASSES),
    )


def is_small(model: str) -> bool:
    """Whether a model is one of these."""
    return model.startswith(("bridge-", "batch-"))


def rows_of(request: InferenceRequested) -> list[bytes]:
    """The rows of a request as bytes, whatever form they have."""
    given = {tensor.name: tensor for tensor in request.inputs or ()}
    if "lengths" not in given:
        return list(unpack(next(iter(given.values())).data))
    ids, rows = list(int32(given["token_ids"].data)), []
    for length in int32(given["lengths"].data):
        rows.append(bytes(each % 256 for each in ids[:length]))
        ids = ids[length:]
    return rows


def vector(row: bytes, size: int = SIZE) -> list[float]:
    """The embedding of a row."""
    if row.decode(errors="replace") == UNBOUNDED:
        return [math.nan, math.inf, -math.inf, 0.1][:size]
    return [len(row) / 8, sum(row) / 4, row[0] / 2 if row else 0.0, 0.1][:size]


def small_answer(request: InferenceRequested) -> tuple[tuple[Tensor, ...], int]:
    """The outputs, and how many tokens the prompt had: one a byte."""
    rows = rows_of(request)
    if request.model.endswith("-embed"):
        size = int(request.parameters.get("dimensions", SIZE))
        numbers = [number for row in rows for number in vector(row, size)]
        data = struct.pack(f"<{len(numbers)}f", *numbers)
        return (Tensor("embedding", "FP32", (len(rows), size), data),), sum(map(len, rows))
    count = min(int(request.parameters.get("top_k", len(LABELS))), len(LABELS))
    names, scores = [], []
    for row in rows:
        first = min(len(row) // 4, len(LABELS) - 1)
        names += [LABELS[(first + each) % len(LABELS)].encode() for each in range(count)]
        unbounded = row.decode(errors="replace") == UNBOUNDED
        scores += [
            ((math.nan, math.inf, -math.inf) if unbounded else (0.5, 0.25, 0.125))[each] for each in range(count)
        ]
    shape = (len(rows), count)
    labels = Tensor("label", "BYTES", shape, pack(names))
    tokens = 0 if request.model.endswith("-bytes") else sum(map(len, rows))
    return (labels, Tensor("score", "FP32", shape, struct.pack(f"<{len(scores)}f", *scores))), tokens
