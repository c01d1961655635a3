"""Model files made for tests, each of a few nodes, by the `onnx` package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from infra.onnx_signature import MODEL_FILE

ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
RANKS = 5
"""From none to four dimensions."""
EXTREMES: dict[str, Any] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65_535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-32_768, 32_767],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP16": [float("nan"), -65_504.0],
    "BF16": [0x7FC0, 0xFF80],  # a NaN and -infinity, as bits
    "FP32": [float("nan"), float("-inf")],
    "FP64": [float("inf"), 5e-324],
    "BYTES": ["", "a\0b — ü 𝄞"],
}
"""What is hard of each datatype."""
Shape = Sequence[int | str | None]
Value = tuple[str, str, Shape]
"""Name, datatype and shape; an extent in words may be any."""


def write(folder: Path, nodes: Sequence[Any], inputs: Sequence[Value], outputs: Sequence[Value], **more: Any) -> Path:
    """A model folder with these nodes."""
    graph = helper.make_graph(list(nodes), "made", _values(inputs), _values(outputs), **more)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(folder / MODEL_FILE))
    return folder


def _values(values: Sequence[Value]) -> list[Any]:
    return [helper.make_tensor_value_info(name, ONNX_TYPES[kind], list(shape)) for name, kind, shape in values]


def identity(folder: Path, datatype: str, shape: Shape) -> Path:
    """`y` is `x`."""
    return write(
        folder, [helper.make_node("Identity", ["x"], ["y"])], [("x", datatype, shape)], [("y", datatype, shape)]
    )


def doubling(folder: Path, shape: Shape = ("n", "width")) -> Path:
    """`y` is `x` + `x`, and `sum` adds up each row of it, FP32."""
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"]),
        helper.make_node("ReduceSum", ["y", "axes"], ["sum"], keepdims=0),
    ]
    outputs = [("y", "FP32", shape), ("sum", "FP32", shape[:1])]
    return write(folder, nodes, [("x", "FP32", shape)], outputs, initializer=[axes])


def drawing(folder: Path) -> Path:
    """Adds noise to each row of two floats, other noise each time."""
    nodes = [
        helper.make_node("RandomNormalLike", ["input"], ["noise"]),
        helper.make_node("Add", ["input", "noise"], ["output"]),
    ]
    return write(folder, nodes, [("input", "FP32", ("n", 2))], [("output", "FP32", ("n", 2))])


def picking(folder: Path) -> Path:
    """`y` is the element of a table of three at each of `x`, INT64 [n, w]: one out of range fails the whole run."""
    table = helper.make_tensor("table", TensorProto.FLOAT, [3], [10.0, 20.0, 30.0])
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    return write(folder, [node], [("x", "INT64", ("n", "w"))], [("y", "FP32", ("n", "w"))], initializer=[table])


def embedding(folder: Path, table: Any, *, pooled: bool = False, masked: bool = True) -> Path:
    """Of each of `input_ids`, INT64 [n, w], its row of a table of FP32; `pooled` into their mean. It takes a mask, and doesn't look at it."""
    shape = ("n", table.shape[1]) if pooled else ("n", "w", table.shape[1])
    name = "sentence_embedding" if pooled else "last_hidden_state"
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["rows"])]
    nodes += [helper.make_node("ReduceMean", ["rows"], [name], axes=[1], keepdims=0)] if pooled else []
    nodes += [] if pooled else [helper.make_node("Identity", ["rows"], [name])]
    inputs: list[Value] = [("input_ids", "INT64", ("n", "w"))]
    inputs += [("attention_mask", "INT64", ("n", "w"))] if masked else []
    kept = helper.make_tensor("table", TensorProto.FLOAT, table.shape, table.ravel().tolist())
    return write(folder, nodes, inputs, [(name, "FP32", shape)], initializer=[kept])


def pairing(folder: Path) -> Path:
    """`y` is `a` + `b`, FP32 [n, 5], and `said` is `word`, BYTES [n]."""
    nodes = [helper.make_node("Add", ["a", "b"], ["y"]), helper.make_node("Identity", ["word"], ["said"])]
    inputs: list[Value] = [("a", "FP32", ("n", 5)), ("b", "FP32", ("n", 5)), ("word", "BYTES", ("n",))]
    return write(folder, nodes, inputs, [("y", "FP32", ("n", 5)), ("said", "BYTES", ("n",))])


def filling(folder: Path) -> Path:
    """`y` is as many bytes as `count` says, INT64 [1], each of them 7, UINT8 [count]."""
    seven = helper.make_tensor("value", TensorProto.UINT8, [1], [7])
    node = helper.make_node("ConstantOfShape", ["count"], ["y"], value=seven)
    return write(folder, [node], [("count", "INT64", (1,))], [("y", "UINT8", ("size",))])


def quantising(folder: Path) -> Path:
    """`y` is `x`, FP32 [n, w], in 256 steps from the least to the largest number of all rows: what shares a batch decides how coarse they are."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["steps", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["steps", "scale", "zero"], ["y"]),
    ]
    return write(folder, nodes, [("x", "FP32", ("n", "w"))], [("y", "FP32", ("n", "w"))])


def looping(folder: Path) -> Path:
    """`y` is 0 + 1 + 1 and so on, as often as the largest of `turns` says, INT64 [n, 1]: a large one never ends."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["on"]), helper.make_node("Add", ["value", "one"], ["next"])],
        "body",
        _values([("turn", "INT64", ()), ("going", "BOOL", ()), ("value", "FP32", ("n", 1))]),
        _values([("on", "BOOL", ()), ("next", "FP32", ("n", 1))]),
    )
    constants = [
        helper.make_tensor("true", TensorProto.BOOL, [], [True]),
        helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]),
        helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
    ]
    nodes = [
        helper.make_node("ReduceMax", ["turns"], ["most"], keepdims=0),
        helper.make_node("Cast", ["turns"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "zero"], ["start"]),
        helper.make_node("Loop", ["most", "true", "start"], ["y"], body=body),
    ]
    return write(folder, nodes, [("turns", "INT64", ("n", 1))], [("y", "FP32", ("n", 1))], initializer=constants)


def counting_rows(folder: Path, name: str | None) -> Path:
    """`y` has as many rows as `x` has elements that aren't zero, FP32 [n, w]: rows of callers can't be told apart in it. `name` is its dimension's."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"]),
        helper.make_node("Transpose", ["where"], ["y"]),
    ]
    return write(folder, nodes, [("x", "FP32", ("n", "w"))], [("y", "INT64", (name, 2))])


def scoring(folder: Path, labels: int, *, masked: bool = True, length: int | str = "length") -> Path:
    """A text classifier: `logits` [batch, labels], of which the label that the tokens' sum names is 4 and others are 0. Without a mask padding counts."""
    nodes = [
        helper.make_node("Mul" if masked else "Identity", ["input_ids", "attention_mask"][: 1 + masked], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "axes"], ["sums"], keepdims=0),
        helper.make_node("Mod", ["sums", "count"], ["chosen"]),
        helper.make_node("OneHot", ["chosen", "count", "values"], ["logits"]),
    ]
    constants = [
        helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
        helper.make_tensor("count", TensorProto.INT64, [], [labels]),
        helper.make_tensor("values", TensorProto.FLOAT, [2], [0.0, 4.0]),
    ]
    inputs: list[Value] = [(name, "INT64", ("batch", length)) for name in ("input_ids", "attention_mask")[: 1 + masked]]
    return write(folder, nodes, inputs, [("logits", "FP32", ("batch", labels))], initializer=constants)


def grading(folder: Path, labels: int) -> Path:
    """A text classifier whose `logits` [batch, labels] are all of some size: a twentieth of (the tokens' sum times the label's place) modulo 97."""
    nodes = [
        helper.make_node("Mul", ["input_ids", "attention_mask"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "axes"], ["sums"], keepdims=1),
        helper.make_node("Mul", ["sums", "places"], ["products"]),
        helper.make_node("Mod", ["products", "most"], ["marks"]),
        helper.make_node("Cast", ["marks"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "step"], ["logits"]),
    ]
    constants = [
        helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
        helper.make_tensor("places", TensorProto.INT64, [1, labels], range(1, labels + 1)),
        helper.make_tensor("most", TensorProto.INT64, [], [97]),
        helper.make_tensor("step", TensorProto.FLOAT, [], [0.05]),
    ]
    inputs: list[Value] = [(name, "INT64", ("batch", "length")) for name in ("input_ids", "attention_mask")]
    return write(folder, nodes, inputs, [("logits", "FP32", ("batch", labels))], initializer=constants)


def everything(folder: Path) -> Path:
    """An input of each datatype and of each rank up to 4, such as `fp32_2`, and the same again as `fp32_2_back`; BF16 can't stand beside BYTES."""
    return _back(folder, [kind for kind in ONNX_TYPES if kind != "BF16"])


def typed(folder: Path) -> Path:
    """As `everything`, but for FP16, which has no field in typed contents, nor a form in the JSON of KServe's client."""
    return _back(folder, [kind for kind in ONNX_TYPES if kind not in {"BF16", "FP16"}])


def brain(folder: Path) -> Path:
    """As `everything`, of BF16."""
    return _back(folder, ["BF16"])


def _back(folder: Path, kinds: Sequence[str]) -> Path:
    given = [(f"{kind.lower()}_{rank}", kind, ("n", "a", "b", "c")[:rank]) for kind in kinds for rank in range(RANKS)]
    nodes = [helper.make_node("Identity", [name], [f"{name}_back"]) for name, _, _ in given]
    return write(folder, nodes, given, [(f"{name}_back", kind, shape) for name, kind, shape in given])
