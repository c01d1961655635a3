"""What a batch job has asked and waits for: a unit, and the answers that came so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from cli.batch_lines import Line
from schemas.errors import HeadraceError
from schemas.events import InferenceAnswered, InferenceRequested, Usage
from schemas.topics import BATCH


@dataclass(slots=True, eq=False)
class Flight:
    """A unit that is asked.

    Attributes:
        split: its lines are asked one by one.
        requests: what is asked, by part, until it is answered.
        places: of each partition of `answers` the first offset of an answer to it.
        shown: its output, where it waits for units before it.
    """

    unit: int
    lines: list[Line]
    split: bool
    requests: dict[int, InferenceRequested]
    size_bytes: int
    answers: dict[int, InferenceAnswered] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    shown: list[tuple[bytes, bool]] | None = None


def size_of(request: InferenceRequested) -> int:
    """About what a request weighs."""
    tensors = sum(len(tensor.data) for tensor in request.inputs or ())
    chars = len(request.prompt or "") + sum(len(message.content) for message in request.messages or ())
    return 1_000 + tensors + chars + 8 * len(request.prompt_token_ids or ())


def fault_of(line: Line) -> HeadraceError:
    """Why a line can't be asked."""
    assert line.fault is not None
    return line.fault


def refused(request: InferenceRequested, tenant: str, error: HeadraceError) -> InferenceAnswered:
    """What stands for the answer to a request that can't be written."""
    return InferenceAnswered(
        request.request_id, tenant, request.model, "", BATCH, (), Usage(0, 0), error.reason.value, error.message
    )
