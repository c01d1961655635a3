"""Texts, given as their tokens: vectors for them, or labels. Rows are padded, and an attention mask hides what was added."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from infra.onnx_args import CLS, LAST, MAX, POOLED_RANK, OnnxArgs
from infra.onnx_signature import FileSignature, model_output
from schemas.events import Tensor
from schemas.processors import DIMENSIONS, EMBEDDING, LENGTHS, TEXT_CLASSIFICATION, TOKEN_IDS, VECTOR
from schemas.tensors import ANY
from workers.engines.arrays import DTYPES, Array, to_array, to_tensor
from workers.engines.port import EngineError
from workers.engines.tensors import TensorRequest
from workers.processors.labels import Labels
from workers.processors.port import Part, Prepared, by_name, invalid, wanted, whole_number
from workers.processors.rows import RowPlan

IDS, MASK = "input_ids", "attention_mask"


class Tokens:
    """Makes a model's inputs of token ids. Texts between two bucket lengths run together, padded to the longest of them."""

    def __init__(self, file: FileSignature, args: OnnxArgs, context_length: int, fetch: str, pad_id: int) -> None:
        """Of a model that takes `input_ids`, and may take a mask and token types."""
        self._dtypes = {spec.name: DTYPES[spec.datatype] for spec in file.inputs}
        length = next(spec.shape[1] for spec in file.inputs if spec.name == IDS)
        self._length = None if length == ANY else length
        self._context = min(context_length, length) if self._length else context_length
        self._buckets = sorted(args.buckets)
        self._rows = RowPlan.of(file, args.max_batch_size)
        self._fetch = (fetch,)
        self._pad_id = pad_id

    def parts(self, request: TensorRequest) -> tuple[list[Part], list[int]]:
        """As `RowPlan.parts`. Raises HeadraceError (invalid_request) for tokens that don't add up or are too many."""
        given = by_name(request.inputs)
        if TOKEN_IDS not in given or LENGTHS not in given:
            raise invalid(f"`{TOKEN_IDS}` and `{LENGTHS}` must be given")
        ids, lengths = to_array(given[TOKEN_IDS]), to_array(given[LENGTHS])
        ends = np.cumsum(lengths).tolist()
        counts = lengths.tolist()
        if not ends or min(counts) < 1 or ends[-1] != ids.size:
            raise invalid(f"`{LENGTHS}` must be at least 1 each, and add up to the {ids.size} of `{TOKEN_IDS}`")
        if max(counts) > self._context:
            raise invalid(f"a text has {max(counts)} tokens; the model takes {self._context}")
        if self._length and MASK not in self._dtypes and min(counts) != self._length:
            raise invalid(
                f"a text has {min(counts)} tokens; the model takes {self._length}, and has no mask to hide padding"
            )
        rows = [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return self._rows.parts(rows, self._fetch, self._bucket)

    def _bucket(self, row: Array) -> int:
        """What is equal of texts that run together; without a mask to hide the padding, their length."""
        return bisect_left(self._buckets, row.size) if MASK in self._dtypes else row.size

    def feeds(self, payloads: Sequence[Sequence[Array]]) -> dict[str, Array]:
        """Ids [rows, longest], padded at the end, with their mask."""
        rows = [row for payload in payloads for row in payload]
        lengths = np.fromiter((row.size for row in rows), np.int64, len(rows))
        longest = self._length or int(lengths.max())
        ids = np.full((len(rows), longest), self._pad_id, dtype=self._dtypes[IDS])
        for index, row in enumerate(rows):
            ids[index, : row.size] = row
        made: dict[str, Array] = {IDS: ids}
        for name in self._dtypes:
            if name == MASK:
                made[name] = (np.arange(longest) < lengths[:, None]).astype(self._dtypes[name])
            elif name != IDS:
                made[name] = np.zeros(ids.shape, dtype=self._dtypes[name])
        return made


class Embedding:
    """A vector a text, pooled from its tokens' unless the model does that itself."""

    def __init__(self, file: FileSignature, args: OnnxArgs, context_length: int, pad_id: int = 0) -> None:
        """Of a model file. Raises HeadraceError (invalid_request) for one without vectors."""
        output = model_output(EMBEDDING, file.outputs)
        self._tokens = Tokens(file, args, context_length, output.name, pad_id)
        self._args = args
        self._size = output.shape[-1]

    def prepare(self, request: TensorRequest) -> Prepared:
        """Texts of any lengths."""
        cut = whole_number(request.parameters, DIMENSIONS)
        if self._size != ANY:
            _check_cut(cut, self._size)
        parts, order = self._tokens.parts(request)

        def finish(done: Sequence[Sequence[Array]]) -> tuple[Tensor, ...]:
            vectors = in_order([part[0] for part in done], order)
            if cut is not None:
                _check_cut(cut, vectors.shape[1])
                vectors = vectors[:, :cut]
            if self._args.normalize:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            return wanted((to_tensor(VECTOR, "FP32", vectors),), request.outputs)

        return Prepared(parts, finish)

    def feeds(self, payloads: Sequence[Sequence[Array]]) -> dict[str, Array]:
        """See `Tokens`."""
        return self._tokens.feeds(payloads)

    def reduce(self, outputs: Sequence[Array], feeds: Mapping[str, Array]) -> Sequence[Array]:
        """Vectors [rows, d] of each text's own tokens; a model that pools gives them itself."""
        found = outputs[0].astype(np.float32, copy=False)
        return [found if found.ndim == POOLED_RANK else pooled(self._args.pooling, found, feeds.get(MASK))]


def pooled(pooling: str, vectors: Array, mask: Array | None) -> Array:
    """Vectors [rows, d] of those of tokens [rows, length, d]. The mask [rows, length] tells a text's own tokens, which come first; without one all are."""
    if pooling == CLS:
        return vectors[:, 0]
    own = np.ones(vectors.shape[:2], np.float32) if mask is None else mask.astype(np.float32)
    lengths = own.sum(axis=1)
    if pooling == LAST:
        last: Array = vectors[np.arange(len(vectors)), lengths.astype(np.int64) - 1]
        return last
    if pooling == MAX:
        largest: Array = np.where(own[:, :, None] > 0, vectors, -np.inf).max(axis=1)
        return largest
    mean: Array = np.matmul(own[:, None, :], vectors)[:, 0] / lengths[:, None]
    return mean


class TextClassification:
    """Labels with scores for each text."""

    def __init__(
        self,
        file: FileSignature,
        args: OnnxArgs,
        context_length: int,
        labels: Labels,
        scores: Callable[[Array], Array],
        *,
        pad_id: int = 0,
    ) -> None:
        """Of a model file; `scores` makes them of its logits. Raises HeadraceError (invalid_request) for one whose output isn't a score a label."""
        output = model_output(TEXT_CLASSIFICATION, file.outputs)
        if output.shape[1] not in {ANY, len(labels.names)}:
            raise invalid(f"the model gives {output.shape[1]} scores, and config.json names {len(labels.names)} labels")
        self._tokens = Tokens(file, args, context_length, output.name, pad_id)
        self._labels = labels
        self._scores = scores

    def prepare(self, request: TensorRequest) -> Prepared:
        """Texts of any lengths."""
        parts, order = self._tokens.parts(request)
        return Prepared(parts, lambda done: self._labels.ranked(in_order([part[0] for part in done], order), request))

    def feeds(self, payloads: Sequence[Sequence[Array]]) -> dict[str, Array]:
        """See `Tokens`."""
        return self._tokens.feeds(payloads)

    def reduce(self, outputs: Sequence[Array], feeds: Mapping[str, Array]) -> Sequence[Array]:  # noqa: ARG002 - the port's
        """Scores [rows, labels]."""
        return [self._scores(outputs[0].astype(np.float32, copy=False))]


def scores_for(problem_type: Any, labels: int) -> Callable[[Array], Array]:
    """What makes scores of logits [rows, labels], as Hugging Face's `TextClassificationPipeline` chooses.

    A regression's are its own numbers. Of several labels that exclude one another scores add up to 1; each stands for itself where a text
    may have several, and where there is one alone, which would always have 1.
    """
    if problem_type == "regression":
        return lambda logits: logits
    return _sigmoid if problem_type == "multi_label_classification" or labels == 1 else _softmax


def _sigmoid(logits: Array) -> Array:
    scores: Array = np.exp(-np.logaddexp(0, -logits))
    return scores


def _softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores: Array = raised / raised.sum(axis=1, keepdims=True)
    return scores


def _check_cut(cut: int | None, size: int) -> None:
    if cut is not None and cut > size:
        raise invalid(f"`{DIMENSIONS}` is {cut}; the model's vectors have {size}", f"parameters.{DIMENSIONS}")


def in_order(arrays: Sequence[Array], order: Sequence[int]) -> Array:
    """The rows of all, put back into the order of the request."""
    rows = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if len(rows) != len(order):
        raise EngineError(f"the model gave {len(rows)} rows for {len(order)}")
    if len(arrays) == 1:
        return rows
    placed = np.empty_like(rows)
    placed[order] = rows
    return placed
