"""What is served, as the protocol tells it. A language model looks as Triton's vLLM backend shows one: text in, text out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bridge.door import FrontDoor
from decisions.readiness import why_not_ready
from infra.directory import ModelDirectory
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.parts import TensorSpec
from schemas.reasons import Reason
from schemas.tensors import ANY, BYTES

SERVER = "headrace"
VERSION = "0.1.0"
EXTENSIONS = ("binary_tensor_data", "model_repository", "parameters", "schedule_policy", "generate")
READY, UNAVAILABLE = "READY", "UNAVAILABLE"
"""A version's states in the index, as Triton has them."""

TEXT_INPUT, STREAM, SAMPLING_PARAMETERS, EXCLUDE_INPUT = (
    "text_input",
    "stream",
    "sampling_parameters",
    "exclude_input_in_output",
)
TEXT_OUTPUT, FINISH_REASON = "text_output", "finish_reason"
TEXT_INPUTS = (
    TensorSpec(TEXT_INPUT, BYTES, (1,)),
    TensorSpec(STREAM, "BOOL", (1,)),
    TensorSpec(SAMPLING_PARAMETERS, BYTES, (1,)),
    TensorSpec(EXCLUDE_INPUT, "BOOL", (1,)),
)
TEXT_OUTPUTS = (TensorSpec(TEXT_OUTPUT, BYTES, (ANY,)), TensorSpec(FINISH_REASON, BYTES, (ANY,)))
_PLATFORMS = {"onnx": "onnx_onnxv1"}


def find(models: ModelDirectory, name: str, version: str = "") -> ModelVersionRegistered:
    """The version that serves a model's name. Raises HeadraceError (model_not_found), also for another version than that."""
    found = models.resolve(name)
    if found is None:
        raise HeadraceError(Reason.MODEL_NOT_FOUND, f"no model {name!r} is deployed", param="model")
    if version not in ("", found.version):
        text = f"the model {name!r} has no version {version!r} that can be asked; {found.version!r} is served"
        raise HeadraceError(Reason.MODEL_NOT_FOUND, text, param="version")
    return found


def takes_tensors(version: ModelVersionRegistered) -> bool:
    """Whether it is a tensor model; else it is a language model."""
    return bool(version.inputs)


def inputs_of(version: ModelVersionRegistered) -> tuple[TensorSpec, ...]:
    """What it takes."""
    return version.inputs or TEXT_INPUTS


def outputs_of(version: ModelVersionRegistered) -> tuple[TensorSpec, ...]:
    """What it gives."""
    return version.outputs if version.inputs else TEXT_OUTPUTS


def platform_of(version: ModelVersionRegistered) -> str:
    """The protocol's name of the engine, where it has one."""
    return _PLATFORMS.get(version.engine, version.engine)


def server_metadata() -> dict[str, Any]:
    """`GET /v2`."""
    return {"name": SERVER, "version": VERSION, "extensions": list(EXTENSIONS)}


def model_metadata(version: ModelVersionRegistered) -> dict[str, Any]:
    """`GET /v2/models/{model}`."""
    return {
        "name": version.model,
        "versions": [version.version],
        "platform": platform_of(version),
        "inputs": [_spec(spec) for spec in inputs_of(version)],
        "outputs": [_spec(spec) for spec in outputs_of(version)],
    }


def not_by_call() -> HeadraceError:
    """Why the model repository extension's calls load and unload nothing, as with Triton where models aren't controlled by calls."""
    text = (
        "models are loaded and unloaded by their workers, and not by a call: `headrace models register`, `headrace worker MODEL VERSION` and "
        "`headrace models promote MODEL VERSION` serve a version, and a worker that is stopped unloads it"
    )
    return HeadraceError(Reason.METHOD_NOT_ALLOWED, text)


class Readiness:
    """Whether models can be served now: this front door takes calls, and a worker of the version is ready."""

    def __init__(self, door: FrontDoor, not_ready: Callable[[], str | None]) -> None:
        """`not_ready` gives the reason why no calls should come, or None."""
        self._door = door
        self._not_ready = not_ready

    @property
    def server(self) -> bool:
        """Whether calls should come, for whatever model."""
        return self._not_ready() is None

    def why_not(self, version: ModelVersionRegistered) -> str | None:
        """The reason why a version can't be served now, or None.

        Reports grow old by this machine's clock, so a front door that reads none any more soon takes nobody for ready.
        """
        workers = self._door.workers.serving(version.model, version.version)
        now_ms = int(time.time() * 1000)
        return self._not_ready() or why_not_ready(workers, now_ms, self._door.settings.worker_stale_ms)

    def index(self, *, ready_only: bool) -> list[dict[str, str]]:
        """`POST /v2/repository/index`: every model's served version, or those that are ready."""
        told = [_entry(version, self.why_not(version)) for version in self._door.models.all()]
        return [entry for entry in told if entry["state"] == READY or not ready_only]


def _entry(version: ModelVersionRegistered, reason: str | None) -> dict[str, str]:
    state = READY if reason is None else UNAVAILABLE
    return {"name": version.model, "version": version.version, "state": state, "reason": reason or ""}


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
