"""`/v1/embeddings`: from OpenAI's body to one request in the log, and from its outputs to OpenAI's object."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.openai_inputs import EmbeddingRequest
from bridge.rendering import Json
from bridge.tensor_calls import Models, TensorCall, head, output, parsed_body, timeout_of, version_for
from decisions.signature import DIMENSIONS, EMBEDDING, TEXT, text_tensors
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered, Tensor, Usage
from schemas.reasons import Reason
from schemas.tensors import texts

OUTPUT = "embedding"
_FLOAT_BYTES = 4


class EmbeddingCall(TensorCall):
    """One parsed call."""

    def __init__(self, raw: Mapping[str, Any], timeout_ms: int | None, models: Models) -> None:
        """Raises HeadraceError: invalid_request, unsupported_parameter, model_not_found."""
        body: EmbeddingRequest = parsed_body(EmbeddingRequest, raw)
        version = version_for(models, body.model, (EMBEDDING,), "embeddings")
        self._base64 = body.encoding_format == "base64"
        _check_dimensions(version, body.dimensions)
        wishes = {} if body.dimensions is None else {DIMENSIONS: str(body.dimensions)}
        self.ask(version, text_inputs(body.input), wishes, body.user, timeout_of(body.timeout, timeout_ms))

    def body(self, outputs: Sequence[Tensor], usage: Usage, request_id: str) -> Json:
        """`{"object": "list", "data": [{"object": "embedding", …}], …}`; floats are numpy's, which orjson takes."""
        shown = head("embd", request_id, self.model, usage)
        return {**shown, "data": embeddings(output(outputs, OUTPUT, "FP32", 2), self._base64)}


def text_inputs(items: Sequence[Any]) -> tuple[Tensor, ...]:
    """Texts, or the token ids of texts, as a text processor takes them."""
    return (texts(TEXT, items),) if isinstance(items[0], str) else text_tensors(items)


def embeddings(tensor: Tensor, as_base64: bool) -> list[Json]:
    """OpenAI's objects, one a row. A number that isn't finite is null, and exact in base64."""
    rows, size = tensor.shape
    if as_base64:
        width = size * _FLOAT_BYTES
        parts = [tensor.data[row * width : (row + 1) * width] for row in range(rows)]
        shown: list[Any] = [base64.b64encode(part).decode() for part in parts]
    else:
        shown = list(np.frombuffer(tensor.data, "<f4").reshape(rows, size))
    return [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]


def _check_dimensions(version: ModelVersionRegistered, dimensions: int | None) -> None:
    """Raises HeadraceError (invalid_request) if more are asked for than the model has."""
    most = next((spec.shape[-1] for spec in version.outputs if spec.name == OUTPUT and spec.shape), -1)
    if dimensions is not None and 0 < most < dimensions:
        text = f"the model `{version.model}` has {most} dimensions, and {dimensions} are asked for"
        raise HeadraceError(Reason.INVALID_REQUEST, text, param=DIMENSIONS)
