"""What KServe's own client gets of models, as JSON on standard output: run by `test_small_models.py`.

In a process of its own, since KServe's and Triton's clients each load their copy of the protocol's messages under the same names. Standard
input is a JSON object: `url`, `grpc` (an address), `key`, and `asks`, a list of {`how`, `model`, `inputs`}; `how` is "rest", "rest json" or "grpc".
Arrays are as `as_json` makes them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

import numpy as np

from schemas.tensors import pack, unpack


def as_json(array: Any, datatype: str) -> dict[str, Any]:
    """An array, bit by bit. Elements of BYTES are str or bytes."""
    if datatype == "BYTES":
        data = pack(each.encode() if isinstance(each, str) else bytes(each) for each in array.ravel())
    else:
        data = array.tobytes()
    kind = "object" if datatype == "BYTES" else str(array.dtype)
    return {"datatype": datatype, "kind": kind, "shape": array.shape, "data": base64.b64encode(data).decode()}


def of_json(told: dict[str, Any]) -> Any:
    """The array; elements of BYTES are bytes."""
    data = base64.b64decode(told["data"])
    if told["kind"] != "object":
        return np.frombuffer(data, told["kind"]).reshape(told["shape"])
    found = np.empty(int(np.prod(told["shape"])), dtype=object)
    found[:] = list(unpack(data))
    return found.reshape(told["shape"])


async def main(given: dict[str, Any]) -> list[Any]:
    """The outputs of each ask, by name."""
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
    from kserve.protocol.infer_type import RequestedOutput

    rest, grpc = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60)), InferenceGRPCClient(given["grpc"])
    found = []
    for ask in given["asks"]:
        binary = ask["how"] != "rest json"
        inputs = []
        for name, told in ask["inputs"].items():
            item = InferInput(name, list(told["shape"]), told["datatype"])
            item.set_data_from_numpy(of_json(told), binary_data=binary)
            inputs.append(item)
        wanted = [RequestedOutput(name, parameters={"binary_data": binary}) for name in ask["outputs"]]
        request = InferRequest(ask["model"], inputs, request_outputs=wanted)
        if ask["how"] == "grpc":
            answer = await grpc.infer(request, headers=(("authorization", f"Bearer {given['key']}"),))
        else:
            headers = {"Authorization": f"Bearer {given['key']}"}  # it writes into them
            answer = await rest.infer(given["url"], request, model_name=ask["model"], headers=headers)
        found.append({item.name: as_json(item.as_numpy(), item.datatype) for item in answer.outputs})
    await grpc.close()
    await rest.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
