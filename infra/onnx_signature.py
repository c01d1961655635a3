"""What a model file takes and gives, as its callers see it.

    python -m infra.onnx_signature FOLDER

prints the file's own tensors as JSON. `onnxruntime` is imported in that program alone, so that a file it can't bear ends nothing else,
and a command that registers a model doesn't load it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.programs import argv_of, search_path
from schemas.errors import HeadraceError
from schemas.events import TensorSpec
from schemas.processors import (
    BYTES_CLASSIFICATION,
    CONTENT,
    EMBEDDING,
    LABEL,
    LENGTHS,
    PROCESSORS,
    SCORE,
    TEXT,
    TOKEN_IDS,
    VECTOR,
)
from schemas.reasons import Reason
from schemas.tensors import ANY, BYTES

MODEL_FILE = "model.onnx"
READ_TIMEOUT_S = 300
_NAMELESS = re.compile(r"^(unk__\d+)?$")
"""What tf2onnx calls a dimension that has no name."""
DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": BYTES,
}
"""The protocol's datatypes, by ONNX Runtime's names. What isn't here can't be served: sequences, maps, complex numbers, 4 and 8 bit floats."""


@dataclass(frozen=True, slots=True)
class FileSignature:
    """The tensors of a model file. `batched` says that the first dimension of all of them counts rows, and may be any."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool

    @property
    def fixed_rows(self) -> int:
        """How many rows the model always takes at once, or 0 if that may differ."""
        extents = {spec.shape[0] for spec in self.inputs if spec.shape}
        return extents.pop() if len(extents) == 1 and ANY not in extents else 0


def of_session(session: Any) -> FileSignature:
    """Of an `onnxruntime.InferenceSession`. Raises HeadraceError for a type that the protocol has no datatype for."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    batched = _batched([_first(node) for node in inputs], [_first(node) for node in outputs])
    return FileSignature(tuple(map(_spec, inputs)), tuple(map(_spec, outputs)), batched)


def _first(node: Any) -> int | str | None:
    """The extent of a tensor's first dimension: a number, a name, or None where it has none; 0 of a scalar."""
    extent = node.shape[0] if node.shape else 0
    return extent if isinstance(extent, int) else extent or None


def _batched(inputs: Sequence[int | str | None], outputs: Sequence[int | str | None]) -> bool:
    """Whether first dimensions are one number of rows. Only names tell: an output with a name of its own may count anything."""
    if not inputs or any(isinstance(each, int) for each in (*inputs, *outputs)):
        return False
    names = {str(each or "") for each in inputs}
    if len(names) > 1:
        return False
    (name,) = names
    return all(each == name or _NAMELESS.match(str(each or "")) for each in outputs)


def _spec(node: Any) -> TensorSpec:
    if node.type not in DATATYPES:
        raise HeadraceError(
            Reason.INVALID_REQUEST,
            f"the model's tensor `{node.name}` is {node.type}; served are {', '.join(DATATYPES)}",
        )
    shape = tuple(extent if isinstance(extent, int) else ANY for extent in node.shape or ())
    return TensorSpec(node.name, DATATYPES[node.type], shape)


def read_signature(folder: Path) -> FileSignature:
    """Of the model file in a folder. Blocks for a second or more. Raises HeadraceError (invalid_request) with the reader's own text."""
    if not (folder / MODEL_FILE).is_file():
        raise HeadraceError(Reason.INVALID_REQUEST, f"{folder} holds no {MODEL_FILE}")
    try:
        done = subprocess.run(
            argv_of("infra.onnx_signature", str(folder)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **search_path()},
            timeout=READ_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HeadraceError(
            Reason.INVALID_REQUEST, f"{folder / MODEL_FILE} took longer than {READ_TIMEOUT_S} s to read"
        ) from None
    if done.returncode != 0:
        told = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise HeadraceError(Reason.INVALID_REQUEST, f"{folder / MODEL_FILE} can't be loaded: {told}")
    raw = json.loads(done.stdout)
    inputs, outputs = (
        tuple(TensorSpec(each["name"], each["datatype"], tuple(each["shape"])) for each in raw[side])
        for side in ("inputs", "outputs")
    )
    return FileSignature(inputs, outputs, raw["batched"])


def public_signature(processor: str, file: FileSignature) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """What callers of a model with this processor give and get. Raises HeadraceError (invalid_request) if the file doesn't fit the processor."""
    if not processor:
        return file.inputs, file.outputs
    if processor not in PROCESSORS:
        raise HeadraceError(
            Reason.INVALID_REQUEST, f"there is no processor {processor!r}; there are {', '.join(PROCESSORS)}"
        )
    model = model_output(processor, file.outputs)
    if processor == BYTES_CLASSIFICATION:
        if len(file.inputs) != 1 or file.inputs[0].datatype != "INT32" or len(file.inputs[0].shape) != 2:
            raise _misfit(processor, "one input, INT32 of two dimensions", file.inputs)
        return (TensorSpec(CONTENT, BYTES, (ANY,)),), _labels()
    ids = {spec.name: spec for spec in file.inputs}
    if "input_ids" not in ids or set(ids) - {"input_ids", "attention_mask", "token_type_ids"}:
        raise _misfit(processor, "input_ids, and may have attention_mask and token_type_ids", file.inputs)
    if any(spec.datatype not in {"INT32", "INT64"} or len(spec.shape) != 2 for spec in file.inputs):
        raise _misfit(processor, "inputs of INT32 or INT64 with two dimensions", file.inputs)
    inputs = (
        TensorSpec(TEXT, BYTES, (ANY,)),
        TensorSpec(TOKEN_IDS, "INT32", (ANY,)),
        TensorSpec(LENGTHS, "INT32", (ANY,)),
    )
    if processor == EMBEDDING:
        return inputs, (TensorSpec(VECTOR, "FP32", (ANY, model.shape[-1])),)
    return inputs, _labels()


def model_output(processor: str, outputs: Sequence[TensorSpec]) -> TensorSpec:
    """The model's own output that a processor reads: a vector a row or a token, or the labels' scores a row. Raises as `public_signature`."""
    wanted = ("sentence_embedding", "last_hidden_state", "token_embeddings") if processor == EMBEDDING else ("logits",)
    named = {spec.name: spec for spec in outputs}
    found = next((named[name] for name in wanted if name in named), outputs[0])
    ranks = (2, 3) if processor == EMBEDDING else (2,)
    if found.datatype not in {"FP32", "FP16", "FP64"} or len(found.shape) not in ranks:
        kind = "a vector a row or a token" if processor == EMBEDDING else "a score a label in each row"
        raise _misfit(processor, f"an output of floats with {kind}", outputs)
    return found


def _labels() -> tuple[TensorSpec, ...]:
    return TensorSpec(LABEL, BYTES, (ANY, ANY)), TensorSpec(SCORE, "FP32", (ANY, ANY))


def _misfit(processor: str, wanted: str, found: Sequence[TensorSpec]) -> HeadraceError:
    shown = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in found[:8])
    return HeadraceError(
        Reason.INVALID_REQUEST, f"the processor {processor} is for a model with {wanted}; this file has {shown}"
    )


def _print(folder: Path) -> None:
    """Prints the signature; ends with status 1 and the reason on standard error where there is none."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(folder / MODEL_FILE, options, providers=["CPUExecutionProvider"])
        found = of_session(session)
    except Exception as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        raise SystemExit(1) from None
    sys.stdout.write(json.dumps(asdict(found)))


if __name__ == "__main__":
    _print(Path(sys.argv[1]))
