"""The messages of the protocol's gRPC service, as a table: names, numbers and types are those of its published description.

Sources: kserve/open-inference-protocol `open_inference_grpc.proto`, and for `RepositoryIndex` and `ModelStreamInfer`, which it doesn't have, Triton's
`grpc_service.proto`. The classes are made when this is loaded, in a pool of their own, so that a process may also load a client's copy of
the same names.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

_FIELD = descriptor_pb2.FieldDescriptorProto
_PARAMETERS = "map InferParameter"
_TENSOR = {
    "name": (1, "string"),
    "datatype": (2, "string"),
    "shape": (3, "repeated int64"),
    "parameters": (4, _PARAMETERS),
    "contents": (5, "InferTensorContents"),
}
_METADATA = {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "repeated int64")}
_NAMED = {"name": (1, "string"), "version": (2, "string")}
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "repeated string")},
    "ModelMetadataRequest": _NAMED,
    "ModelMetadataResponse.TensorMetadata": _METADATA,
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "repeated string"),
        "platform": (3, "string"),
        "inputs": (4, "repeated ModelMetadataResponse.TensorMetadata"),
        "outputs": (5, "repeated ModelMetadataResponse.TensorMetadata"),
    },
    "InferParameter": {
        "bool_param": (1, "oneof bool"),
        "int64_param": (2, "oneof int64"),
        "string_param": (3, "oneof string"),
        "double_param": (4, "oneof double"),
        "uint64_param": (5, "oneof uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "repeated bool"),
        "int_contents": (2, "repeated int32"),
        "int64_contents": (3, "repeated int64"),
        "uint_contents": (4, "repeated uint32"),
        "uint64_contents": (5, "repeated uint64"),
        "fp32_contents": (6, "repeated float"),
        "fp64_contents": (7, "repeated double"),
        "bytes_contents": (8, "repeated bytes"),
    },
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, _PARAMETERS)},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "inputs": (5, "repeated ModelInferRequest.InferInputTensor"),
        "outputs": (6, "repeated ModelInferRequest.InferRequestedOutputTensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "ModelInferResponse.InferOutputTensor": _TENSOR,
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "outputs": (5, "repeated ModelInferResponse.InferOutputTensor"),
        "raw_output_contents": (6, "repeated bytes"),
    },
    "ModelStreamInferResponse": {"error_message": (1, "string"), "infer_response": (2, "ModelInferResponse")},
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "RepositoryIndexResponse.ModelIndex": {
        "name": (1, "string"),
        "version": (2, "string"),
        "state": (3, "string"),
        "reason": (4, "string"),
    },
    "RepositoryIndexResponse": {"models": (1, "repeated RepositoryIndexResponse.ModelIndex")},
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    found = descriptor_pb2.FileDescriptorProto(name="headrace/open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for name in sorted(_MESSAGES, key=lambda name: name.count(".")):
        outer, _, own = name.rpartition(".")
        made[name] = made[outer].nested_type.add(name=own) if outer else found.message_type.add(name=own)
    for name, fields in _MESSAGES.items():
        for field, (number, kind) in fields.items():
            _add(made[name], name, field, number, kind)
    return found


def _add(message: descriptor_pb2.DescriptorProto, path: str, name: str, number: int, kind: str) -> None:
    how, _, what = kind.rpartition(" ")
    field = message.field.add(name=name, number=number, json_name=name)
    field.label = _FIELD.LABEL_REPEATED if how in ("repeated", "map") else _FIELD.LABEL_OPTIONAL
    if how == "map":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add(entry, f"{path}.{entry.name}", "key", 1, "string")
        _add(entry, f"{path}.{entry.name}", "value", 2, what)
        what = f"{path}.{entry.name}"
    if how == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if what[0].isupper():
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{what}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{what.upper()}")


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def message(name: str) -> Any:
    """The class of a message, such as `ModelInferRequest`."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
