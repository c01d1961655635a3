"""No processor: callers give the model's own inputs and get its own outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from decisions.batching import slices, too_many
from infra.onnx_signature import FileSignature
from schemas.events import Tensor
from schemas.tensors import misfit, unequal_rows
from workers.engines.arrays import Array, to_array, to_tensor
from workers.engines.port import EngineError
from workers.engines.tensors import TensorRequest
from workers.processors.port import Part, Prepared, by_name, invalid

Payload = tuple[Array, ...]


class Raw:
    """Where the first dimension is any for all tensors it counts rows, and rows are batched; else a request runs as it is."""

    def __init__(self, file: FileSignature, max_batch_size: int) -> None:
        """Of a model file."""
        self._file = file
        self._names = tuple(spec.name for spec in file.inputs)
        self._specs = {spec.name: spec for spec in file.inputs}
        self._outputs = {spec.name: spec for spec in file.outputs}
        self._max = max_batch_size

    def prepare(self, request: TensorRequest) -> Prepared:
        """Checks names, datatypes and shapes, and cuts what has more rows than run at once."""
        given = self._given(request.inputs)
        fetch = self._fetch(request.outputs)
        rows = given[self._names[0]].shape[0] if self._file.batched else 0
        if (found := too_many(rows, self._max)) is not None:
            raise invalid(found)
        arrays = tuple(to_array(given[name]) for name in self._names)

        def finish(parts: Sequence[Sequence[Array]]) -> tuple[Tensor, ...]:
            return tuple(
                to_tensor(name, self._outputs[name].datatype, _joined(name, [part[i] for part in parts], rows))
                for i, name in enumerate(fetch)
            )

        if rows == 0:
            return Prepared((Part(None, 1, arrays, fetch),), finish)
        signature = (fetch, tuple(array.shape[1:] for array in arrays))
        return Prepared(
            [
                Part(signature, end - at, tuple(array[at:end] for array in arrays), fetch)
                for at, end in slices(rows, self._max)
            ],
            finish,
        )

    def feeds(self, payloads: Sequence[Payload]) -> dict[str, Array]:
        """The inputs of all, one after the other."""
        if len(payloads) == 1:
            return dict(zip(self._names, payloads[0], strict=True))
        return {name: np.concatenate([payload[i] for payload in payloads]) for i, name in enumerate(self._names)}

    def reduce(self, outputs: Sequence[Array], feeds: Mapping[str, Array]) -> Sequence[Array]:  # noqa: ARG002 - the port's
        """Everything is kept."""
        return outputs

    def _given(self, inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        given = by_name(inputs)
        for name, tensor in given.items():
            if (spec := self._specs.get(name)) is None:
                raise invalid(f"the model has no input `{name}`; it has {', '.join(self._names)}")
            if (found := misfit(tensor, spec)) is not None:
                raise invalid(found)
        if missing := [name for name in self._names if name not in given]:
            raise invalid(f"the input `{missing[0]}` is missing")
        if self._file.batched and (found := unequal_rows(inputs)) is not None:
            raise invalid(found)
        return given

    def _fetch(self, names: Sequence[str]) -> tuple[str, ...]:
        if missing := [name for name in names if name not in self._outputs]:
            raise invalid(f"the model has no output `{missing[0]}`; it has {', '.join(self._outputs)}", "outputs")
        return tuple(name for name in self._outputs if not names or name in names)


def _joined(name: str, arrays: Sequence[Array], rows: int) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    if not arrays[0].ndim or sum(array.shape[0] for array in arrays) != rows:
        raise EngineError(
            f"the output `{name}` doesn't have a row for each of the {rows} rows given; send fewer at once"
        )
    return np.concatenate(arrays)
