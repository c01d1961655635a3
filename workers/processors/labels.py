"""Labels with scores, best first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schemas.events import Tensor
from schemas.processors import LABEL, SCORE, TOP_K
from schemas.tensors import BYTES, pack
from workers.engines.arrays import Array
from workers.engines.port import EngineError
from workers.engines.tensors import TensorRequest
from workers.processors.port import wanted, whole_number


class Labels:
    """The names of a model's classes, in its order."""

    def __init__(self, names: Sequence[str]) -> None:
        """At least one."""
        self.names = tuple(names)
        self._packed = _objects([pack([name.encode()]) for name in names])

    def ranked(self, scores: Array, request: TensorRequest, named: dict[int, str] | None = None) -> tuple[Tensor, ...]:
        """Of scores [n, classes] the outputs `label` and `score` [n, k], best first; of equals the first in the model's order is first.

        Rows in `named` have that one label with the score 1, before the others.
        """
        if scores.ndim != 2 or scores.shape[1] != len(self.names):
            raise EngineError(f"the model gave scores {list(scores.shape)} for {len(self.names)} labels")
        count = min(whole_number(request.parameters, TOP_K) or len(self.names), len(self.names))
        order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        best = np.take_along_axis(scores, order, axis=1).astype("<f4")
        packed = self._packed[order]
        alike: dict[str, list[int]] = {}
        for row, name in (named or {}).items():
            alike.setdefault(name, []).append(row)
        for name, rows in alike.items():
            packed[rows] = self._first(name, count)
            best[rows] = 0
            best[rows, 0] = 1
        shape = (scores.shape[0], count)
        label = Tensor(LABEL, BYTES, shape, b"".join(packed.ravel().tolist()))
        return wanted((label, Tensor(SCORE, "FP32", shape, best.tobytes())), request.outputs)

    def _first(self, name: str, count: int) -> Array:
        """So many labels: the name, and the others in the model's order."""
        others = [each for known, each in zip(self.names, self._packed, strict=True) if known != name]
        return _objects([pack([name.encode()]), *others][:count])


def _objects(values: Sequence[bytes]) -> Array:
    """As they are: an array of numpy's own bytes would cut zeros at their ends."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
