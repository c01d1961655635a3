"""Batch jobs for small models on the whole path: values of ONNX Runtime, and models whose files take a fixed number of rows."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cli.models import register_versions, version_of
from infra.models_file import ModelEntry
from infra.onnx_signature import MODEL_FILE
from tests.system.direct_onnx import direct_scores, direct_vectors
from tests.system.fixtures_models import workers
from tests.system.fixtures_small import beside
from tests.system.running import RunningStack
from tests.system.test_batch import answers

EMBED, ONES, TWOS, FILES = "batch-minilm", "batch-minilm-ones", "batch-minilm-twos", "batch-magika"
FIXED = {ONES: 1, TWOS: 2}
TOLERANCE = 1e-5
TEXTS = [" ".join(["The headrace leads water to the wheel."] * (1 + n % 4)) + f" {n}" for n in range(150)]
CONTENTS = [f"import os\n\nfor name in os.listdir('{n}'):\n    print(name)\n".encode() * 4 for n in range(70)]
EMBEDDING = {"processor": "text-embedding", "slots": 64}


def with_rows(folder: Path, rows: int, made: Path) -> Path:
    """A model folder whose file takes exactly so many rows, else as another."""
    beside(folder, made)
    model = onnx.load(folder / MODEL_FILE)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = rows
    onnx.save(model, str(made / MODEL_FILE))
    return made


@pytest.fixture(scope="module")
def models(
    stack: RunningStack, minilm_dir: Path, magika_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """MiniLM as it is, and as it would be if it took one text, or two, at once; and Magika. Each has a worker."""
    folder = tmp_path_factory.mktemp("fixed")
    entries = [
        ModelEntry(EMBED, "1", "onnx", str(minilm_dir), 256, **EMBEDDING),  # type: ignore[arg-type]
        *(ModelEntry(name, "1", "onnx", str(with_rows(minilm_dir, rows, folder / name)), 256, **EMBEDDING) for name, rows in FIXED.items()),  # type: ignore[arg-type]
        ModelEntry(FILES, "1", "onnx", str(magika_dir), 512, slots=64, processor="bytes-classification"),
    ]  # fmt: skip
    versions = [version_of(entry, stack.data_dir, lambda _text: None) for entry in entries]
    assert {version.model: version.fixed_rows for version in versions} == {EMBED: 0, FILES: 0, **FIXED}
    stack.thread.run(register_versions(stack.kafka, versions))
    with workers(stack, {f"{entry.name}-a": entry.name for entry in entries}):
        yield


@pytest.fixture(scope="module")
def vectors(minilm_dir: Path) -> Any:
    return direct_vectors(minilm_dir, TEXTS)


def asked(stack: RunningStack, folder: Path, lines: list[Any], *options: str) -> dict[str, Any]:
    """The output's lines of a job, by their ids, all of them answers."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = stack.command("batch", "run", str(source), str(out), "--tenant", "acme", "--json", *options)
    facts = json.loads(done.stdout)
    assert (facts["lines"], facts["done"], facts["failed"]) == (len(lines), len(lines), 0)
    return answers(out)


def requests_of(found: dict[str, Any]) -> set[str]:
    return {line["response"]["request_id"] for line in found.values()}


def embedding(item: dict[str, Any]) -> Any:
    """An embedding in either form."""
    told = item["embedding"]
    return np.frombuffer(base64.b64decode(told), "<f4") if isinstance(told, str) else np.array(told)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_those_of_onnx_runtime(
    stack: RunningStack, models: None, vectors: Any, tmp_path: Path, form: str
) -> None:
    """Lines of OpenAI's form with one text, or two, and plain ones."""
    pairs: dict[str, list[int]] = {}
    lines: list[dict[str, Any]] = []
    for n in range(0, len(TEXTS), 3):
        body = {"model": EMBED, "input": TEXTS[n : n + 2], "encoding_format": form}
        lines.append({"custom_id": f"two {n}", "method": "POST", "url": "/v1/embeddings", "body": body})
        body = {"model": EMBED, "input": TEXTS[n + 2], "encoding_format": form}
        lines.append({"custom_id": f"one {n + 2}", "method": "POST", "url": "/v1/embeddings", "body": body})
        pairs |= {f"two {n}": [n, n + 1], f"one {n + 2}": [n + 2]}
    found = asked(stack, tmp_path, lines)
    for name, line in found.items():
        rows = [embedding(item) for item in line["response"]["body"]["data"]]
        np.testing.assert_allclose(np.array(rows), vectors[pairs[name]], rtol=0, atol=TOLERANCE)
    assert len(requests_of(found)) == -(-len(TEXTS) // 64), "lines travel together"


@pytest.mark.parametrize("model", [EMBED, *FIXED])
def test_every_line_is_answered_however_many_rows_the_file_takes(
    stack: RunningStack, models: None, vectors: Any, tmp_path: Path, model: str
) -> None:
    rows = FIXED.get(model, 1)
    lines = [{"input": TEXTS[n : n + rows]} for n in range(0, 60, rows)]
    found = asked(stack, tmp_path, lines, "--model", model)
    told = [embedding(item) for n in range(len(lines)) for item in found[f"line-{n + 1}"]["response"]["body"]["data"]]
    np.testing.assert_allclose(np.array(told), vectors[:60], rtol=0, atol=TOLERANCE)
    assert len(requests_of(found)) == (len(lines) if model in FIXED else 1)


def test_classes_are_those_of_onnx_runtime(stack: RunningStack, models: None, magika_dir: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"base64": base64.b64encode(content).decode()} if n % 2 else {"text": content.decode(), "id": f"text {n}"}
        for n, content in enumerate(CONTENTS)
    ]
    found = asked(stack, tmp_path, lines, "--model", FILES, "--top-k", "1000")
    for n, wanted in enumerate(direct_scores(magika_dir, CONTENTS)):
        (item,) = found[f"line-{n + 1}" if n % 2 else f"text {n}"]["response"]["body"]["data"]
        told = {each["label"]: each["score"] for each in item["classes"]}
        assert told.keys() == wanted.keys()
        assert max(abs(told[name] - wanted[name]) for name in wanted) < TOLERANCE
        assert item["label"] == max(wanted, key=lambda name: wanted[name])
