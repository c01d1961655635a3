"""What a model file takes and gives, read in a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from infra.onnx_signature import FileSignature, _batched, public_signature, read_signature
from schemas.errors import HeadraceError
from schemas.events import TensorSpec
from tests.onnx_models import write


def test_every_extent_that_may_differ_is_any(tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    folder = write(tmp_path, [node], [("x", "FP16", ("n", 3, None))], [("y", "FP16", ("n", 3, None))])
    assert read_signature(folder) == FileSignature(
        (TensorSpec("x", "FP16", (-1, 3, -1)),), (TensorSpec("y", "FP16", (-1, 3, -1)),), batched=True
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "batched"),
    [
        (["n"], ["n"], True),
        (["n", "n"], ["n", None], True),
        ([None], [None], True),
        (["unk__1"], ["unk__2"], True),
        (["n"], ["m"], False),
        (["n"], ["unk__2"], True),
        (["unk__1"], ["n"], False),
        (["n", "m"], ["n"], False),
        (["n"], [4], False),
        ([4], [4], False),
        (["n", 0], ["n"], False),
        ([], ["n"], False),
    ],
)
def test_rows_are_put_together_only_where_their_dimension_is_one(
    inputs: list[Any], outputs: list[Any], batched: bool
) -> None:
    assert _batched(inputs, outputs) is batched


@pytest.mark.parametrize(
    ("shapes", "fixed"),
    [
        ([(4, 3)], 4),
        ([(4, 3), (4,)], 4),
        ([(4, 3), ()], 4),
        ([(4, 3), (2, 3)], 0),
        ([(4, 3), (-1, 3)], 0),
        ([(-1, 3)], 0),
        ([()], 0),
    ],
)
def test_rows_are_fixed_where_all_inputs_say_the_same_number(shapes: list[tuple[int, ...]], fixed: int) -> None:
    inputs = tuple(TensorSpec(f"x{index}", "FP32", shape) for index, shape in enumerate(shapes))
    assert FileSignature(inputs, (), batched=False).fixed_rows == fixed


def test_a_type_that_the_protocol_does_not_have_is_named(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("SequenceConstruct", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(HeadraceError, match=r"can't be loaded: the model's tensor `y` is seq\(tensor\(float\)\)"):
        read_signature(tmp_path)


def test_what_is_no_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"holds no model\.onnx"):
        read_signature(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07junk")
    with pytest.raises(HeadraceError, match=r"model\.onnx can't be loaded: .*INVALID_PROTOBUF"):
        read_signature(tmp_path)


def test_a_text_model_takes_tokens_that_it_knows(tmp_path: Path) -> None:
    ids = TensorSpec("input_ids", "INT64", (-1, -1))
    vectors = TensorSpec("last_hidden_state", "FP32", (-1, -1, 8))
    for inputs in ((TensorSpec("x", "INT64", (-1, -1)),), (ids, TensorSpec("pixels", "FP32", (-1, 3)))):
        with pytest.raises(HeadraceError, match="is for a model with input_ids"):
            public_signature("text-embedding", FileSignature(inputs, (vectors,), batched=True))
    with pytest.raises(HeadraceError, match="an output of floats with a score a label"):
        public_signature("text-classification", FileSignature((ids,), (vectors,), batched=True))


def test_nothing_that_reads_it_loads_the_runtime() -> None:
    code = "import sys, infra.onnx_signature, infra.models_file; sys.exit('onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
