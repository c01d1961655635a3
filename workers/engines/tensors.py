"""The port of engines for tensor models: tensors in, tensors out, one answer a request, batched with others as the engine likes.

Everything runs in the caller's event loop; an engine keeps its heavy work in threads or processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from schemas.parts import Tensor
from workers.engines.port import EngineStats


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """One answer to make.

    Attributes:
        key: names this run of it; unique in the engine.
        inputs: as the version's signature has them, prepared as far as admission does that.
        outputs: the names of those that are wanted; all if there are none.
        parameters: the processor's, such as `top_k`.
        deadline_ms: from when on nobody waits for it, in ms since 1970.
        priority: lower runs first.
        tenant: whose it is.
        shared: what names the answer, if equal requests that run at once may have one run (see `shared_tensors`); an engine passes over it.
    """

    key: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    parameters: Mapping[str, str]
    deadline_ms: int
    priority: int
    tenant: str
    shared: str = ""


@dataclass(frozen=True, slots=True)
class TensorResult:
    """An answer.

    Attributes:
        outputs: in the order of the request's `outputs`, or of the signature.
        batch: the rows of the run that it was part of, its own among them; 0 if the model isn't batched.
        queue_ms: how long it waited in the engine.
        model_ms: how long its run took, and those before it in which its batch failed.
    """

    outputs: tuple[Tensor, ...]
    batch: int
    queue_ms: float
    model_ms: float


@runtime_checkable
class TensorEngine(Protocol):
    """See the module. Cancelling the task that awaits `infer` takes the request out."""

    async def start(self) -> None:
        """Loads the model; returns when it can infer. Raises EngineDead, or HeadraceError for a configuration it refuses."""

    async def infer(self, request: TensorRequest) -> TensorResult:
        """The answer. Raises EngineError for what only this request suffers, its deadline included; EngineDead for all."""

    def stats(self) -> EngineStats:
        """What the engine does now. Raises EngineDead once it is gone."""

    async def shutdown(self) -> None:
        """Frees everything; safe to call twice, and after a start that failed."""
