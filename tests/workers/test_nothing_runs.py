"""Nothing of an artifact is run, whatever lies in its folder, and whoever works there."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infra.manifest import MANIFEST
from infra.onnx_signature import MODEL_FILE, read_signature
from infra.programs import argv_of, search_path
from schemas.errors import HeadraceError
from tests.onnx_models import doubling, write
from tests.workers.onnx_site import array, floats, request, serving
from workers.engines.onnx import OnnxEngine
from workers.engines.port import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
RUN_S_MAX = 240
MODULES = (
    "json",
    "re",
    "asyncio",
    "numpy",
    "onnxruntime",
    "tokenizers",
    "infra",
    "schemas",
    "workers",
    "text",
    "sitecustomize",
    "usercustomize",
    "__init__",
    "__main__",
    "conftest",
    "config",
    "configuration",
    "handler",
    "model",
    "modeling",
    "pipeline",
    "preprocessor",
    "processor",
    "tokenization",
    "tokenizer",
)
PICKLES = ("config.pkl", "labels.pickle", "model.joblib", "model.pkl", "model.pt", "processor.pkl", "pytorch_model.bin", "tokenizer.pkl", "weights.npy")  # fmt: skip
SERVE = """
import asyncio, sys
from pathlib import Path
from infra.models_file import ModelEntry
from cli.models import version_of
from text.tokenizer import load_tokenizer
from tests.workers.onnx_site import array, request, serving
from decisions.signature import text_tensors

version = version_of(ModelEntry("m", "1", "onnx", ".", 256, processor="text-embedding"), Path("."), print)
ids = load_tokenizer(version.artifact).encode("a river", add_special_tokens=True)

async def main():
    async with serving(Path(version.artifact), version.processor) as engine:
        return array(await engine.infer(request(*text_tensors([ids]))), "embedding").shape

print(asyncio.run(main()))
"""


class Marks:
    """Leaves its mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self._mark)!r}, 'a').write('unpickled ')",)


def poison(folder: Path, mark: Path) -> None:
    """Scripts, pickles, libraries and settings that would each run something."""
    script = f"open({str(mark)!r}, 'a').write(__name__ + ' ')\n"
    for name in MODULES:
        (folder / f"{name}.py").write_text(script)
    (folder / "poison.pth").write_text(f"import os; {script}")
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Marks(mark)))
    source = folder / "constructor.c"
    source.write_text(
        f'#include <stdlib.h>\n__attribute__((constructor)) void run() {{ system("echo library >> {mark}"); }}\n'
    )
    if compiler := shutil.which("cc"):
        for name in ("libcustom_ops.so", "custom_op_library.so", "ortextensions.so"):
            subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / name, source], check=True)
    remote = {"AutoModel": "modeling.Model", "AutoTokenizer": ["tokenization.Tokenizer", None]}
    settings = {
        "auto_map": remote,
        "trust_remote_code": True,
        "processor": "processor.py",
        "custom_ops": "libcustom_ops.so",
    }
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        known = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps({**known, **settings}))


def test_whoever_registers_and_serves_in_a_poisoned_folder_runs_nothing_of_it(minilm_dir: Path, tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    folder.mkdir()
    for file in minilm_dir.iterdir():
        if file.is_file() and file.name != MANIFEST:
            (folder / file.name).symlink_to(file)
    poison(folder, mark)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVE],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout.splitlines()[-1] == "(1, 384)"
    assert not mark.exists(), mark.read_text()


def test_a_program_of_headraces_finds_its_own_modules_and_none_where_it_is_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    doubling(tmp_path)
    poison(tmp_path, mark)
    argv, env = argv_of("infra.onnx_signature", "."), {**os.environ, **search_path()}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=RUN_S_MAX, check=True)
    assert json.loads(done.stdout)["batched"]
    assert not mark.exists(), mark.read_text()


async def test_a_model_is_served_with_no_library_of_its_folder(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    doubling(tmp_path)
    poison(tmp_path, mark)
    file = onnx.load(str(tmp_path / MODEL_FILE))
    entry = file.metadata_props.add()
    entry.key, entry.value = "ort_config", json.dumps({"session_options": {"custom_ops": "libcustom_ops.so"}})
    onnx.save(file, str(tmp_path / MODEL_FILE))
    async with serving(tmp_path) as engine:
        assert array(await engine.infer(request(floats([1, 2])))).tolist() == [[2, 4]]
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not mark.exists(), mark.read_text()


@pytest.mark.parametrize("domain", ["a.library", "ai.onnx.contrib", "com.microsoft.python"])
async def test_a_model_that_needs_operators_of_a_library_is_refused_in_words(tmp_path: Path, domain: str) -> None:
    mark, shape = tmp_path / "mark", ("n",)
    node = helper.make_node("PyOp", ["x"], ["y"], domain=domain, module="processor", class_name="Model", compute="run")
    write(tmp_path, [node], [("x", "FP32", shape)], [("y", "FP32", shape)])
    file = onnx.load(str(tmp_path / MODEL_FILE))
    file.opset_import.append(helper.make_opsetid(domain, 1))
    onnx.save(file, str(tmp_path / MODEL_FILE))
    poison(tmp_path, mark)
    with pytest.raises(HeadraceError, match="PyOp"):
        read_signature(tmp_path)
    with pytest.raises(HeadraceError, match=r"model\.onnx can't be loaded: .*PyOp"):
        await OnnxEngine(EngineConfig("m", str(tmp_path), 1, 8)).start()
    assert not mark.exists(), mark.read_text()


@pytest.mark.parametrize("place", ["../secret", "{}/secret", "link", "folder/../../secret"])
async def test_weights_are_read_from_its_folder_and_no_other(tmp_path: Path, place: str) -> None:
    """A model names files for its weights, and gives back what they hold."""
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (folder / "link").symlink_to(tmp_path / "secret")
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=place.format(tmp_path))
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node],
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        initializer=[weights],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / MODEL_FILE).write_bytes(file.SerializeToString())
    with pytest.raises(HeadraceError, match=r"model\.onnx can't be loaded: .*[Ee]xternal data path"):
        await OnnxEngine(EngineConfig("m", str(folder), 1, 8)).start()
