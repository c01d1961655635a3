"""The port of processors: they make a model's inputs of a request's, and the request's outputs of the model's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from schemas.errors import HeadraceError
from schemas.events import Tensor
from schemas.reasons import Reason
from workers.engines.arrays import Array
from workers.engines.tensors import TensorRequest


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a request that run together.

    Attributes:
        signature: what must be equal of parts that run in one batch; None for a part that runs by itself.
        rows: how many rows it has; at most `max_batch_size`, but for a part that runs by itself.
        payload: the rows, as the processor's own `feeds` takes them.
        fetch: the model's outputs that are needed; equal where signatures are.
    """

    signature: Hashable | None
    rows: int
    payload: Any
    fetch: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, ready to run. `finish` takes for each part what `reduce` gave of its rows, and makes the outputs."""

    parts: Sequence[Part]
    finish: Callable[[Sequence[Sequence[Array]]], tuple[Tensor, ...]]


class Processor(Protocol):
    """`prepare` and `finish` run in the event loop, and of large requests in threads, several at once; `feeds` and `reduce` run in an instance's."""

    def prepare(self, request: TensorRequest) -> Prepared:
        """Cuts a request into parts. Raises HeadraceError (invalid_request) for what the model can't take."""

    def feeds(self, payloads: Sequence[Any]) -> dict[str, Array]:
        """The model's inputs for the rows of several parts, one part after the other."""

    def reduce(self, outputs: Sequence[Array], feeds: Mapping[str, Array]) -> Sequence[Array]:
        """What is kept of the model's outputs; each array still has the rows as its first dimension, if the outputs had."""


def invalid(message: str, param: str = "inputs") -> HeadraceError:
    """A request that the model can't take."""
    return HeadraceError(Reason.INVALID_REQUEST, message, param=param)


def by_name(inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors by their names. Raises HeadraceError (invalid_request) for a name that is given twice: which of them counts, nobody said."""
    found: dict[str, Tensor] = {}
    for tensor in inputs:
        if tensor.name in found:
            raise invalid(f"`{tensor.name[:256]}` is given twice")
        found[tensor.name] = tensor
    return found


def whole_number(parameters: Mapping[str, str], name: str) -> int | None:
    """A parameter above 0, or None if it isn't given."""
    if (value := parameters.get(name)) is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value) > 0):
        raise invalid(f"`{name}` must be a whole number above 0, not {value[:32]!r}", f"parameters.{name}")
    return int(value)


def wanted(outputs: Sequence[Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
    """Those that a request asked for; all if it named none. Raises HeadraceError (invalid_request) for a name that isn't there."""
    known = [tensor.name for tensor in outputs]
    if missing := [name for name in names if name not in known]:
        raise invalid(f"the model has no output `{missing[0][:256]}`; it has {', '.join(known)}", "outputs")
    return tuple(tensor for tensor in outputs if not names or tensor.name in names)
