"""Calls of the inference protocol, by REST and gRPC, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

from tests.bridge.conftest import KEY, RunningBridge

FIVE = {"name": "x", "datatype": "FP32", "shape": [1, 5], "data": [1, 2, 3, 4, 5]}


def auth() -> dict[str, str]:
    """A good caller's headers; Triton's client writes into those that it is given."""
    return {"Authorization": f"Bearer {KEY}"}


def sample(datatype: str) -> np.ndarray[Any, Any]:
    """Two rows with what is hard of each datatype."""
    if datatype == "BYTES":
        return np.array([["", "ä\x00b"], ["long" * 100, "😀"]], dtype=object)
    if datatype == "BOOL":
        return np.array([[True, False], [False, True]])
    kind = np.dtype(triton_to_np_dtype(datatype))
    if kind.kind in "iu":
        top, low = np.iinfo(kind).max, np.iinfo(kind).min
        return np.array([[low, top], [0, 1]], dtype=kind)
    if datatype == "BF16":
        return np.array([[0.0, 1.5], [-2.0, np.inf]], dtype=kind)
    return np.array([[np.nan, np.inf], [-np.inf, 0.1]], dtype=kind)


def body(*inputs: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": list(inputs) or [FIVE], **more}


# --- gRPC -------------------------------------------------------------------------------------------------------------

AUTH = {"authorization": f"Bearer {KEY}"}
METADATA = tuple(AUTH.items())


def address(bridge: RunningBridge) -> str:
    return f"127.0.0.1:{bridge.settings.grpc_port}"


def request(model: str, **inputs: tuple[str, list[int], dict[str, Any]]) -> Any:
    """A request with typed contents."""
    found = service_pb2.ModelInferRequest(model_name=model, id="mine")
    for name, (datatype, shape, contents) in inputs.items():
        item = found.inputs.add(name=name, datatype=datatype, shape=shape)
        for field, values in contents.items():
            getattr(item.contents, field).extend(values)
    return found


def five(model: str, values: int = 5) -> Any:
    return request(model, x=("FP32", [1, 5], {"fp32_contents": [1.0] * values}))


TYPED = [
    ("BOOL", "bool_contents", [True, False]),
    *((kind, "int_contents", [-1, 127]) for kind in ("INT8", "INT16", "INT32")),
    ("INT64", "int64_contents", [-(1 << 63), (1 << 63) - 1]),
    *((kind, "uint_contents", [0, 255]) for kind in ("UINT8", "UINT16", "UINT32")),
    ("UINT64", "uint64_contents", [0, (1 << 64) - 1]),
    ("FP32", "fp32_contents", [0.5, float("-inf")]),
    ("FP64", "fp64_contents", [0.1, float("inf")]),
    ("BYTES", "bytes_contents", [b"", "ä\0a".encode()]),
]
