"""Makes the engine that a model version names. An engine's own packages are imported only when it is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.artifacts import resolve_artifact
from infra.models_file import ENGINES, ONNX, SCRIPTED, VLLM
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from text.tokenizer import BYTES_REF
from workers.engines.port import Engine, EngineConfig
from workers.engines.tensors import TensorEngine


def resolved(version: ModelVersionRegistered, data_dir: Path) -> ModelVersionRegistered:
    """The version with the folder of its weights on this machine, checked against its manifest. Blocks. Raises ArtifactError."""
    if version.engine == SCRIPTED:
        return version
    folder = str(resolve_artifact(version.artifact, data_dir))
    if version.engine == ONNX and not version.tokenizer:
        return replace(version, artifact=folder)
    tokenizer = version.tokenizer if version.tokenizer not in ("", version.artifact) else folder
    return replace(version, artifact=folder, tokenizer=tokenizer)


def config_of(version: ModelVersionRegistered, slots: int) -> EngineConfig:
    """The engine's configuration. Raises HeadraceError (invalid_request) if `engine_args` is no JSON object."""
    try:
        given: Any = json.loads(version.engine_args or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise HeadraceError(
            Reason.INVALID_REQUEST,
            f"engine_args of {version.model} {version.version} must be a JSON object",
            param="engine_args",
        )
    return EngineConfig(version.model, version.artifact, version.context_length, slots, given)


def make_engine(version: ModelVersionRegistered, slots: int) -> Engine:
    """The engine, not yet started. Raises HeadraceError for one that is unknown, not installed, or refuses its arguments."""
    config = config_of(version, slots)
    if version.engine == SCRIPTED:
        from workers.engines.scripted import ScriptedEngine

        return ScriptedEngine(config)
    if version.engine == VLLM:
        from workers.engines.vllm import VllmEngine

        return VllmEngine(config)
    raise _unknown(version)


def make_tensor_engine(version: ModelVersionRegistered) -> TensorEngine:
    """The engine of a version that takes tensors, not yet started. Raises HeadraceError as `make_engine` does."""
    if version.engine == ONNX:
        from workers.engines.onnx import OnnxEngine

        return OnnxEngine(config_of(version, version.slots), version.processor)
    raise _unknown(version)


def _unknown(version: ModelVersionRegistered) -> HeadraceError:
    text = f"{version.model} {version.version} names the engine {version.engine!r}; there are {', '.join(ENGINES)}"
    return HeadraceError(Reason.INVALID_REQUEST, text, param="engine")


def tokenizer_ref(version: ModelVersionRegistered) -> str:
    """What `text.tokenizer.load_tokenizer` takes for a resolved version."""
    return version.tokenizer or BYTES_REF
