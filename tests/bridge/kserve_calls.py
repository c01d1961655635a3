"""What KServe's own client gets from a front door, as JSON on standard output: run by `test_inference_kserve.py`.

It runs in a process of its own, since KServe's and Triton's clients each load their copy of the protocol's messages under the same names.

Usage: python kserve_calls.py HTTP_URL GRPC_ADDRESS API_KEY
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

VALUES: dict[str, Any] = {
    "FP32": np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32),
    "FP64": np.array([[0.1, np.nan]], np.float64),
    "FP16": np.array([[0.5, 65504], [-1, 0]], np.float16),
    "INT64": np.array([[-(1 << 63), 1], [2, (1 << 63) - 1]], np.int64),
    "UINT8": np.array([[0, 255], [1, 2]], np.uint8),
    "BOOL": np.array([[True, False], [False, True]]),
    "BYTES": np.array([["a", "ä"], ["", "😀"]], dtype=object),
}

BINARY = ("FP32", "FP16")
"""What this client sends as null in JSON if it is infinite, and what it sends in no other form."""


def request(datatype: str, binary: bool) -> InferRequest:
    """The same values again, in JSON or binary both ways."""
    values = VALUES[datatype]
    item = InferInput("x", list(values.shape), datatype)
    item.set_data_from_numpy(values, binary_data=binary or datatype in BINARY)
    wanted = [RequestedOutput("y", parameters={"binary_data": binary})]
    return InferRequest(f"tensor-identity-{datatype.lower()}", [item], request_id="mine", request_outputs=wanted)


def same(datatype: str, found: Any) -> bool:
    """Whether a client's array holds what was sent."""
    if datatype == "BYTES":
        found = np.vectorize(lambda each: each.decode() if isinstance(each, bytes) else each, otypes=[object])(found)
    np.testing.assert_array_equal(found, VALUES[datatype])
    return True


async def main(url: str, address: str, key: str) -> dict[str, Any]:
    """What came of each call."""
    headers = {"Authorization": f"Bearer {key}"}
    found: dict[str, Any] = {}
    rest = InferenceRESTClient(RESTConfig(protocol="v2", timeout=30))
    found["live"], found["ready"] = await rest.is_server_live(url), await rest.is_server_ready(url)
    found["model ready"] = await rest.is_model_ready(url, "tensor-sum", headers=dict(headers))
    for datatype in VALUES:
        for binary in (True, False):
            model = f"tensor-identity-{datatype.lower()}"
            answer = await rest.infer(
                url, request(datatype, binary), model_name=model, headers=dict(headers)
            )  # it writes into them
            name = f"rest {datatype} {'binary' if binary else 'json'}"
            found[name] = answer.id == "mine" and same(datatype, answer.outputs[0].as_numpy())
    try:
        await rest.infer(url, request("FP32", True), model_name="tensor-sum", headers=dict(headers))
    except Exception as error:
        found["error"] = str(error)
    grpc = InferenceGRPCClient(address)
    metadata = tuple((name.lower(), value) for name, value in headers.items())
    found["grpc live"] = await grpc.is_server_live()
    found["grpc model ready"] = await grpc.is_model_ready("tensor-sum", headers=metadata)
    for datatype in VALUES:
        answer = await grpc.infer(request(datatype, True), headers=metadata)
        found[f"grpc {datatype}"] = same(datatype, answer.outputs[0].as_numpy())
    await grpc.close()
    await rest.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))))
