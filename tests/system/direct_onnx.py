"""What ONNX Runtime gives where nothing of ours stands between: MiniLM's vectors, Magika's scores, and a text classifier's."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from magika import Magika
from magika.types import Seekable

from text.tokenizer import load_tokenizer


def direct_vectors(folder: Path, texts: Sequence[str]) -> Any:
    """MiniLM's, each of a text by itself."""
    tokenizer, session = load_tokenizer(str(folder)), _session(folder)
    rows = []
    for text in texts:
        ids = np.array([tokenizer.encode(text, add_special_tokens=True)])
        (states,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        mean = states[0].mean(axis=0)
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


def direct_scores(folder: Path, files: Sequence[bytes]) -> list[dict[str, float]]:
    """Magika's by label, each of a file by itself, of its package's own features."""
    magika, labels = Magika(), json.loads((folder / "config.json").read_text())["target_labels_space"]
    session, found = _session(folder), []
    for content in files:
        _, made = magika._get_result_or_features_from_seekable(Seekable(io.BytesIO(content)))
        assert made is not None
        (rows,) = session.run(None, {"bytes": np.array([[*made.beg, *made.end]], np.int32)})
        found.append(dict(zip(labels, rows[0].tolist(), strict=True)))
    return found


def direct_classes(folder: Path, texts: Sequence[str]) -> list[dict[str, float]]:
    """A text classifier's scores by label, each of a text by itself."""
    tokenizer, session = load_tokenizer(str(folder)), _session(folder)
    labels, found = json.loads((folder / "config.json").read_text())["id2label"].values(), []
    for text in texts:
        ids = np.array([tokenizer.encode(text, add_special_tokens=True)])
        (logits,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        raised = np.exp(logits[0].astype(float))
        found.append(dict(zip(labels, (raised / raised.sum()).tolist(), strict=True)))
    return found


def _session(folder: Path) -> Any:
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
