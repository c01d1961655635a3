"""`/v1/classifications`: from the body to one request in the log, and from its outputs to labels with scores.

OpenAI has no such call. The list, its `data` by `index`, and the usage are OpenAI's; `label` and `score` are as Hugging Face's pipelines have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.openai_embeddings import text_inputs
from bridge.openai_inputs import ClassificationRequest
from bridge.rendering import Json
from bridge.tensor_calls import INPUT, Models, TensorCall, head, output, parsed_body, timeout_of, version_for
from decisions.signature import BYTES_CLASSIFICATION, TEXT_CLASSIFICATION, TOP_K
from schemas.errors import HeadraceError
from schemas.events import Tensor, Usage
from schemas.reasons import Reason
from schemas.tensors import BYTES, pack, unpack

BYTES_INPUT = "bytes"
LABEL, SCORE = "label", "score"
TOP_K_DEFAULT = 5


class ClassificationCall(TensorCall):
    """One parsed call."""

    def __init__(self, raw: Mapping[str, Any], timeout_ms: int | None, models: Models) -> None:
        """Raises HeadraceError: invalid_request, unsupported_parameter, model_not_found."""
        body: ClassificationRequest = parsed_body(ClassificationRequest, raw)
        kinds = (TEXT_CLASSIFICATION, BYTES_CLASSIFICATION)
        version = version_for(models, body.model, kinds, "classifications")
        as_bytes = version.processor == BYTES_CLASSIFICATION
        inputs = (_bytes_input(body.input),) if as_bytes else _text_inputs(body.input)
        wishes = {TOP_K: str(body.top_k or TOP_K_DEFAULT)}
        self.ask(version, inputs, wishes, body.user, timeout_of(body.timeout, timeout_ms))

    def body(self, outputs: Sequence[Tensor], usage: Usage, request_id: str) -> Json:
        """`{"object": "list", "data": [{"index": 0, "label": …, "score": …, "classes": […]}], …}`."""
        return {**head("clsf", request_id, self.model, usage), "data": classifications(outputs)}


def classifications(outputs: Sequence[Tensor]) -> list[Json]:
    """One object a row: the best class, and all that were asked for, best first."""
    labels, scores = output(outputs, LABEL, BYTES, 2), output(outputs, SCORE, "FP32", 2)
    if labels.shape != scores.shape or not labels.shape[1]:
        raise HeadraceError(Reason.ENGINE_ERROR, "the model gave labels and scores that don't belong together")
    rows, count = labels.shape
    names = [name.decode("utf-8", "replace") for name in unpack(labels.data)]
    values = np.frombuffer(scores.data, "<f4")
    found = []
    for row in range(rows):
        span = range(row * count, (row + 1) * count)
        classes = [{"label": names[at], "score": values[at]} for at in span]
        found.append({"object": "classification", "index": row, **classes[0], "classes": classes})
    return found


def _bytes_input(items: Sequence[Any]) -> Tensor:
    if isinstance(items[0], list):
        raise HeadraceError(Reason.INVALID_REQUEST, f"{INPUT}: this model takes bytes, not token ids", param=INPUT)
    return Tensor(
        BYTES_INPUT,
        BYTES,
        (len(items),),
        pack(item.encode() if isinstance(item, str) else item for item in items),
    )


def _text_inputs(items: Sequence[Any]) -> tuple[Tensor, ...]:
    return text_inputs([_text(item, f"{INPUT}[{at}]" if len(items) > 1 else INPUT) for at, item in enumerate(items)])


def _text(item: Any, at: str) -> Any:
    if not item:
        raise HeadraceError(Reason.INVALID_REQUEST, f"{at}: is empty", param=at)
    if not isinstance(item, bytes):
        return item
    try:
        return item.decode()
    except UnicodeDecodeError:
        text = f"{at}: this model takes text, and these bytes are not UTF-8"
        raise HeadraceError(Reason.INVALID_REQUEST, text, param=at) from None
