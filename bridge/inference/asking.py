"""A request for inference, whichever of the protocol's forms it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.parts import Tensor
from schemas.topics import ANSWER_MAX_BYTES

ID_CHARS_MAX = 1_024
BYTES_MAX = ANSWER_MAX_BYTES
"""The most that an answer's tensors may have."""

Scalar = bool | int | float | str
Parameters = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that is asked for. `binary`: as binary data; None leaves that to the request. `as_base64` is for BYTES in JSON."""

    name: str
    binary: bool | None = None
    as_base64: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """What a caller asks. `id` is its own name for it, and comes back. Without `outputs` all are wanted; `binary` holds for those that don't say."""

    model: str
    version: str
    id: str
    parameters: Parameters
    inputs: tuple[Tensor, ...]
    outputs: tuple[Wanted, ...] = ()
    binary: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model gave. `final` is false for a part of a stream that goes on."""

    model: str
    version: str
    id: str
    outputs: tuple[Tensor, ...]
    parameters: Parameters
    final: bool = True
