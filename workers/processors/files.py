"""Labels for files: Magika's features of their first and last bytes (google/magika, `Magika._extract_features_from_seekable`).

At most `block_size` bytes of each end are read and stripped of white space; of these the first `beg_size` and the last `end_size` count,
padded to that many. What has fewer than `min_file_size_for_dl` bytes to go by isn't shown to the model: it is `empty`, `txt` if it is
UTF-8, else `unknown`, with the score 1. Labels are the model's own; Magika's thresholds and its renaming of two labels are a caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.onnx_args import OnnxArgs
from infra.onnx_signature import FileSignature, model_output
from schemas.events import Tensor
from schemas.processors import BYTES_CLASSIFICATION, CONTENT
from schemas.tensors import ANY, unpack
from workers.engines.arrays import Array
from workers.engines.tensors import TensorRequest
from workers.processors.labels import Labels
from workers.processors.port import Prepared, by_name, invalid
from workers.processors.rows import RowPlan
from workers.processors.text import in_order

EMPTY, TXT, UNKNOWN = "empty", "txt", "unknown"


@dataclass(frozen=True, slots=True)
class Features:
    """Sizes as in Magika's `config.min.json`."""

    beg_size: int
    end_size: int
    block_size: int
    padding_token: int
    min_file_size_for_dl: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Features:
        """Of an artifact's config.json. Raises HeadraceError (invalid_request) for features that can't be made."""
        for key in cls.__slots__:
            if not isinstance(config.get(key), int) or config[key] < 0:
                raise invalid(f"config.json must hold the whole number {key}", "artifact")
        if config.get("mid_size") or config.get("use_inputs_at_offsets"):
            raise invalid(
                "config.json asks for features of the middle (mid_size, use_inputs_at_offsets), which aren't made",
                "artifact",
            )
        return cls(**{key: config[key] for key in cls.__slots__})

    def row(self, content: bytes) -> Array | None:
        """The ids of a file's bytes, first the beginning's, INT32 [beg_size + end_size]; None if it has too few."""
        beginning = content[: self.block_size].lstrip()[: self.beg_size]
        if len(content) < self.min_file_size_for_dl or len(beginning) < self.min_file_size_for_dl:
            return None
        end = content[-self.block_size :].rstrip()[-self.end_size :] if self.end_size else b""
        row = np.full(self.beg_size + self.end_size, self.padding_token, dtype=np.int32)
        row[: len(beginning)] = np.frombuffer(beginning, np.uint8)
        row[row.size - len(end) :] = np.frombuffer(end, np.uint8)
        return row

    def name(self, content: bytes) -> str:
        """What a file is that has too few bytes for the model."""
        if not content:
            return EMPTY
        try:
            content[: self.block_size].decode()
        except UnicodeDecodeError:
            return UNKNOWN
        return TXT


class BytesClassification:
    """Labels with scores for each element."""

    def __init__(self, file: FileSignature, args: OnnxArgs, labels: Labels, features: Features) -> None:
        """Of a model file. Raises HeadraceError (invalid_request) if its shapes aren't those of its configuration."""
        output = model_output(BYTES_CLASSIFICATION, file.outputs)
        (taken,) = file.inputs
        width = features.beg_size + features.end_size
        if taken.shape[1] not in {ANY, width} or output.shape[1] not in {ANY, len(labels.names)}:
            raise invalid(
                f"the model takes {list(taken.shape)} and gives {list(output.shape)}; config.json says {width} bytes and "
                f"{len(labels.names)} labels",
                "artifact",
            )
        self._name = taken.name
        self._fetch = (output.name,)
        self._rows = RowPlan.of(file, args.max_batch_size)
        self._labels = labels
        self._features = features

    def prepare(self, request: TensorRequest) -> Prepared:
        """Files of any sizes."""
        given = by_name(request.inputs).get(CONTENT)
        contents = [] if given is None else list(unpack(given.data))
        if not contents:
            raise invalid(f"`{CONTENT}` must be given, with at least one element")
        rows = [self._features.row(content) for content in contents]
        asked = [index for index, row in enumerate(rows) if row is not None]
        named = {i: self._features.name(contents[i]) for i, row in enumerate(rows) if row is None}
        parts, order = self._rows.parts([rows[index] for index in asked], self._fetch, lambda _row: CONTENT)

        def finish(done: Sequence[Sequence[Array]]) -> tuple[Tensor, ...]:
            scores = np.zeros((len(contents), len(self._labels.names)), np.float32)
            if asked:
                scores[asked] = in_order([part[0] for part in done], order)
            return self._labels.ranked(scores, request, named)

        return Prepared(parts, finish)

    def feeds(self, payloads: Sequence[Sequence[Array]]) -> dict[str, Array]:
        """The model's one input, INT32 [rows, bytes]."""
        return {self._name: np.stack([row for payload in payloads for row in payload])}

    def reduce(self, outputs: Sequence[Array], feeds: Mapping[str, Array]) -> Sequence[Array]:  # noqa: ARG002 - the port's
        """The model's own scores, which add up to 1."""
        return [outputs[0].astype(np.float32, copy=False)]
