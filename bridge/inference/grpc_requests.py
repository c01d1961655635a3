"""Requests and answers as the protocol's gRPC messages have them: each tensor's contents typed, or all of them raw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.inference.asking import Answer, Ask, Parameters, Scalar, Wanted
from bridge.inference.elements import NUMPY, array, invalid
from bridge.inference.messages import ModelInferResponse
from bridge.inference.rest_requests import BINARY, BINARY_OUTPUT, read_id
from schemas.errors import HeadraceError
from schemas.parts import Tensor
from schemas.reasons import Reason
from schemas.tensors import BYTES, DATATYPES, ITEM_BYTES, TENSORS_MAX, pack, unpack

CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
"""By datatype, the field of its contents. FP16 and BF16 are always raw."""


def read_message(message: Any) -> Ask:
    """What a `ModelInferRequest` asks; `binary` says that it wants raw contents back. Raises HeadraceError: invalid_request, unsupported_parameter."""
    if len(message.inputs) > TENSORS_MAX or len(message.outputs) > TENSORS_MAX:
        raise invalid(f"at most {TENSORS_MAX} inputs and outputs are taken", "inputs")
    if not message.model_name:
        raise invalid("model_name is empty", "model_name")
    raw = list(message.raw_input_contents)
    if raw and len(raw) != len(message.inputs):
        raise invalid(f"raw_input_contents has {len(raw)} items for {len(message.inputs)} inputs", "raw_input_contents")
    parameters = dict(_parameters(message.parameters))
    binary = [bool(raw), parameters.pop(BINARY_OUTPUT, False)]
    outputs = []
    for index, output in enumerate(message.outputs):
        own = dict(_parameters(output.parameters))
        binary.append(own.pop(BINARY, False))
        if own:
            name = f"outputs[{index}].parameters.{next(iter(own))}"
            raise HeadraceError(Reason.UNSUPPORTED_PARAMETER, f"{name} is not served", param=name)
        outputs.append(Wanted(output.name))
    inputs = tuple(
        _input(item, f"inputs[{index}]", raw[index] if raw else None) for index, item in enumerate(message.inputs)
    )
    return Ask(
        message.model_name, message.model_version, read_id(message.id), parameters, inputs, tuple(outputs), any(binary)
    )


def write_message(ask: Ask, answer: Answer, *, stream: bool = False) -> Any:
    """A `ModelInferResponse`. Contents are raw if the request's were, or if an output has no typed field."""
    found = ModelInferResponse(model_name=answer.model, model_version=answer.version, id=answer.id)
    parameters: dict[str, Scalar] = dict(answer.parameters)
    if stream:
        parameters["triton_final_response"] = answer.final
    write_parameters(found, parameters)
    raw = ask.binary or any(tensor.datatype not in CONTENTS for tensor in answer.outputs)
    for tensor in answer.outputs:
        output = found.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            found.raw_output_contents.append(tensor.data)
        else:
            values = list(unpack(tensor.data)) if tensor.datatype == BYTES else array(tensor).reshape(-1).tolist()
            getattr(output.contents, CONTENTS[tensor.datatype]).extend(values)
    return found


def write_parameters(message: Any, parameters: Parameters) -> None:
    """Adds parameters to a message that has a map of them."""
    for name, value in parameters.items():
        setattr(message.parameters[name], _field_of(value), value)


def _field_of(value: Scalar) -> str:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return kinds[type(value)]


def _parameters(given: Mapping[str, Any]) -> Parameters:
    found: dict[str, Scalar] = {}
    for name, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise invalid(f"the parameter {name} has no value", f"parameters.{name}")
        found[name] = getattr(value, kind)
    return found


def _input(item: Any, where: str, raw: bytes | None) -> Tensor:
    if item.datatype not in DATATYPES:
        raise invalid(f"{where}.datatype must be one of {', '.join(DATATYPES)}", f"{where}.datatype")
    for name in item.parameters:
        text = f"{where}.parameters.{name} is not served"
        if name != "binary_data_size":  # KServe's client tells it here, too, where the size is plain
            raise HeadraceError(Reason.UNSUPPORTED_PARAMETER, text, param=f"{where}.parameters.{name}")
    shape = tuple(item.shape)
    filled = [field.name for field, _ in item.contents.ListFields()]
    if raw is not None:
        if filled:
            raise invalid(f"{where} has contents beside raw_input_contents", where)
        return Tensor(item.name, item.datatype, shape, raw)
    expected = CONTENTS.get(item.datatype)
    if expected is None:
        raise invalid(f"{where}: {item.datatype} must be sent as raw_input_contents", where)
    if wrong := next((name for name in filled if name != expected), None):
        raise invalid(f"{where}: {item.datatype} goes into {expected}, and {wrong} is given", where)
    values = getattr(item.contents, expected)
    return Tensor(item.name, item.datatype, shape, _bytes(where, item.datatype, values))


def _bytes(where: str, datatype: str, values: Any) -> bytes:
    if datatype == BYTES:
        return pack(values)
    wide = np.array(values, dtype={"BOOL": "?", "FP32": "<f4", "FP64": "<f8", "UINT64": "<u8"}.get(datatype, "<i8"))
    narrow = wide.astype(NUMPY[datatype])
    if ITEM_BYTES[datatype] < 4 and datatype != "BOOL" and not bool((narrow == wide).all()):
        index = int((narrow != wide).argmax())
        raise invalid(f"{where}: element {index} is out of the range of {datatype}", where)
    return narrow.tobytes()
