"""Which rows of a request run together, for models whose rows a processor makes itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from decisions.batching import slices
from infra.onnx_signature import FileSignature
from workers.processors.port import Part, invalid


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How many rows a model takes at once: up to `limit`, or always exactly `fixed` (if not 0); those of several requests together only if `shared`."""

    limit: int
    fixed: int
    shared: bool

    @classmethod
    def of(cls, file: FileSignature, max_batch_size: int) -> RowPlan:
        """Of a model file, whose rows are batched up to a size if it allows that."""
        limit = file.fixed_rows or (max_batch_size if file.batched else 1)
        return cls(limit, file.fixed_rows, file.batched)

    def parts(
        self, rows: Sequence[Any], fetch: tuple[str, ...], signature_of: Callable[[Any], Hashable]
    ) -> tuple[list[Part], list[int]]:
        """The rows in parts of one signature each, and the order in which they then stand. Raises HeadraceError for a number that doesn't fit."""
        if self.fixed and len(rows) % self.fixed:
            raise invalid(f"the model takes {self.fixed} items at a time, and {len(rows)} are given")
        alike: dict[Hashable, list[int]] = {}
        for index, row in enumerate(rows):
            alike.setdefault(signature_of(row) if self.shared else None, []).append(index)
        parts, order = [], []
        for signature, indices in alike.items():
            order += indices
            for at, end in slices(len(indices), self.limit):
                parts.append(Part(signature, end - at, [rows[i] for i in indices[at:end]], fetch))
        return parts, order
