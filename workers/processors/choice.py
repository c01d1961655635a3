"""Makes the processor that a model version names, of what its artifact's `config.json` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.onnx_args import OnnxArgs
from infra.onnx_signature import FileSignature, public_signature
from schemas.processors import BYTES_CLASSIFICATION, EMBEDDING, TEXT_CLASSIFICATION
from workers.processors.files import BytesClassification, Features
from workers.processors.labels import Labels
from workers.processors.port import Processor, invalid
from workers.processors.raw import Raw
from workers.processors.text import Embedding, TextClassification, scores_for

CONFIG = "config.json"


def make_processor(name: str, file: FileSignature, folder: Path, args: OnnxArgs, context_length: int) -> Processor:
    """Raises HeadraceError (invalid_request) for a name that isn't in the list, and for an artifact that doesn't fit it."""
    public_signature(name, file)
    if not name:
        return Raw(file, args.max_batch_size)
    config = _config(folder)
    if name == EMBEDDING:
        return Embedding(file, args, context_length, _pad_id(config))
    if name == TEXT_CLASSIFICATION:
        labels = _id2label(config)
        scores = scores_for(config.get("problem_type"), len(labels.names))
        return TextClassification(file, args, context_length, labels, scores, pad_id=_pad_id(config))
    assert name == BYTES_CLASSIFICATION
    return BytesClassification(file, args, _target_labels(config), Features.of(config))


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise invalid(f"{folder / CONFIG} can't be read: {error}", "artifact") from error
    return config if isinstance(config, dict) else {}


def _pad_id(config: dict[str, Any]) -> int:
    found = config.get("pad_token_id")
    return found if isinstance(found, int) else 0


def _id2label(config: dict[str, Any]) -> Labels:
    found = config.get("id2label")
    if not isinstance(found, dict) or not found:
        raise invalid(f"{CONFIG} names no labels (id2label)", "artifact")
    try:
        names = [str(found[str(index)]) for index in range(len(found))]
    except KeyError as error:
        raise invalid(f"id2label in {CONFIG} has no label {error}", "artifact") from None
    return Labels(names)


def _target_labels(config: dict[str, Any]) -> Labels:
    found = config.get("target_labels_space")
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise invalid(f"{CONFIG} names no labels (target_labels_space)", "artifact")
    return Labels(found)
