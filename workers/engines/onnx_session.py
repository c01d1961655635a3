"""A model file in ONNX Runtime: arrays in, arrays out, on CPU. The only place that runs `onnxruntime`."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infra.onnx_signature import MODEL_FILE, of_session
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.tensors import elements
from workers.engines.arrays import DTYPES, Array
from workers.engines.port import EngineError

BFLOAT16 = 16
"""`onnx.TensorProto.BFLOAT16`."""
FATAL = 4
ERROR_CHARS_MAX = 2_000
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")


class Session:
    """One session; its runs may be in any thread, and of a session with one thread at one time. `file` is what the model takes and gives."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Loads the model with so many threads for a run. Blocks. Raises HeadraceError (invalid_request) with the runtime's own text."""
        try:
            import onnxruntime
        except ImportError as error:
            raise HeadraceError(
                Reason.UNAVAILABLE, f"onnxruntime can't be imported ({error}); install the extra onnx"
            ) from error
        path = folder / MODEL_FILE
        if not path.is_file():
            raise HeadraceError(Reason.INVALID_REQUEST, f"{folder} holds no {MODEL_FILE}", param="artifact")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = FATAL
        # Threads that spin between runs take the cores from whoever makes the next batch.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise HeadraceError(
                Reason.INVALID_REQUEST, f"{path} can't be loaded: {text_of(error)}", param="artifact"
            ) from error
        self._ort: Any = onnxruntime
        self.file = of_session(self._session)
        self._types = {spec.name: spec.datatype for spec in (*self.file.inputs, *self.file.outputs)}
        self._brain = "BF16" in self._types.values()
        if self._brain and "BYTES" in self._types.values():
            text = f"{path} has tensors of BF16 and of BYTES; ONNX Runtime's Python API takes a model with one or the other"
            raise HeadraceError(Reason.INVALID_REQUEST, text, param="artifact")

    def options(self) -> Any:
        """For one run; setting its `terminate` from any thread ends the run before its next node."""
        options = self._ort.RunOptions()
        options.log_severity_level = FATAL
        return options

    def run(self, feeds: Mapping[str, Array], fetch: Sequence[str], options: Any) -> list[Array]:
        """The outputs named in `fetch`. Blocks, without holding the interpreter. Raises EngineError with the runtime's own text."""
        try:
            if self._brain:
                return self._run_values(feeds, fetch, options)
            found: list[Array] = self._session.run(fetch, feeds, options)
        except Exception as error:
            raise EngineError(f"the model failed: {text_of(error)}") from error
        return found

    def _run_values(self, feeds: Mapping[str, Array], fetch: Sequence[str], options: Any) -> list[Array]:
        """With BF16, which numpy doesn't know, as bare memory."""
        make = self._ort.OrtValue
        given = {
            name: make.ortvalue_from_numpy_with_onnx_type(np.asarray(array, order="C"), BFLOAT16)
            if self._types[name] == "BF16"
            else make.ortvalue_from_numpy(array)
            for name, array in feeds.items()
        }
        values = self._session.run_with_ort_values(fetch, given, options)
        return [
            _brain_array(value) if self._types[name] == "BF16" else value.numpy()
            for name, value in zip(fetch, values, strict=True)
        ]


def _brain_array(value: Any) -> Array:
    shape = tuple(value.shape())
    size = elements(shape) * 2
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, DTYPES["BF16"]).reshape(shape)


def text_of(error: Exception) -> str:
    """What the runtime says, in one line and without its own prefix."""
    return " ".join(_PREFIX.sub("", str(error)).split())[:ERROR_CHARS_MAX]
