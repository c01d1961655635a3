"""Tensors as arrays and back, without copying where that is possible. BF16 has no type in numpy: it travels as UINT16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.errors import HeadraceError
from schemas.events import Tensor
from schemas.reasons import Reason
from schemas.tensors import BYTES, elements, pack, strings

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    BYTES: np.dtype(object),
}


def to_array(tensor: Tensor) -> Array:
    """A read-only view of the tensor's bytes; of BYTES, an array of texts. Raises HeadraceError (invalid_request) if they don't fit its shape."""
    try:
        if tensor.datatype == BYTES:
            array = np.empty(len(values := strings(tensor)), dtype=object)
            array[:] = values
        else:
            array = np.frombuffer(tensor.data, dtype=DTYPES[tensor.datatype])
    except ValueError as error:
        raise _misfit(tensor, f"its bytes are no elements of {tensor.datatype}: {error}") from None
    if array.size != elements(tensor.shape) or min(tensor.shape, default=0) < 0:
        raise _misfit(tensor, f"the shape {list(tensor.shape)} doesn't take {array.size} elements")
    return array.reshape(tensor.shape)


def _misfit(tensor: Tensor, what: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, f"`{tensor.name}`: {what}", param=f"inputs.{tensor.name}")


def to_tensor(name: str, datatype: str, array: Array) -> Tensor:
    """The array's elements in row-major order; it must be of the datatype's own kind."""
    if datatype == BYTES:
        data = pack(value.encode() for value in array.ravel().tolist())
    else:
        data = array.astype(DTYPES[datatype], copy=False).tobytes()
    return Tensor(name, datatype, tuple(array.shape), data)
