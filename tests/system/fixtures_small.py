"""Small models on the system stack, each with a worker, and a second front door that speaks gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.models import register_versions, version_of
from infra import ports
from infra.manifest import MANIFEST
from infra.models_file import CacheEntry, ModelEntry
from infra.onnx_signature import MODEL_FILE
from tests import onnx_models
from tests.system.fixtures_models import workers
from tests.system.running import RunningStack

DOOR = "bridge-grpc"
MINILM, MAGIKA, GRADES, EVERYTHING, TYPED, BRAIN, PICKING, LOOPING, PAIRING = (
    "minilm",
    "small-magika",
    "grades",
    "everything",
    "typed",
    "brain",
    "picking",
    "looping",
    "pairing",
)
LOOPING_SLOTS = 8
NAMES = ("bad", "so-so", "gut — très bien", "none of these")
"""The labels of `grades`."""


@dataclass(frozen=True, slots=True)
class SmallModels:
    """What is served, and where the front door is: a URL, and an address for gRPC."""

    url: str
    grpc: str
    entries: Sequence[ModelEntry]


def beside(folder: Path, made: Path) -> Path:
    """A new folder with all of a model's files but the model itself."""
    made.mkdir()
    for file in folder.iterdir():
        if file.name not in {MODEL_FILE, MANIFEST}:
            (made / file.name).write_bytes(file.read_bytes())
    return made


def grades(minilm_dir: Path, made: Path) -> Path:
    """A text classifier, with MiniLM's tokenizer."""
    config = json.loads((beside(minilm_dir, made) / "config.json").read_text())
    labelled = {**config, "id2label": dict(enumerate(NAMES))}
    (made / "config.json").write_text(json.dumps(labelled))
    return onnx_models.grading(made, len(NAMES))


@contextmanager
def served(stack: RunningStack, *entries: ModelEntry) -> Iterator[SmallModels]:
    """These models, each with a worker `<name>-a`, and the front door, while the block runs."""
    port, grpc_port = ports.free_port(), ports.free_port()
    versions = [version_of(entry, stack.data_dir, lambda _text: None) for entry in entries]
    stack.thread.run(register_versions(stack.kafka, versions))
    with workers(stack, {f"{entry.name}-a": entry.name for entry in entries}), ExitStack() as cleanup:
        stack.add(DOOR, "bridge", "--port", str(port), HEADRACE_BRIDGE_GRPC_PORT=str(grpc_port))
        cleanup.callback(stack.remove, DOOR)
        stack.await_ready(DOOR)
        yield SmallModels(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", entries)


@pytest.fixture(scope="module")
def small(
    stack: RunningStack, minilm_dir: Path, magika_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SmallModels]:
    """MiniLM, Magika, and `grades`, which labels texts; `everything`, with an input of each datatype and rank, `typed` with those but FP16's, and `brain` with those of BF16."""
    made = tmp_path_factory.mktemp("made")
    everything, brain = onnx_models.everything(made / EVERYTHING), onnx_models.brain(made / BRAIN)
    typed = onnx_models.typed(made / TYPED)
    with served(
        stack,
        ModelEntry(MINILM, "1", "onnx", str(minilm_dir), 256, slots=32, processor="text-embedding", cache=CacheEntry(ttl_s=600)),
        ModelEntry(MAGIKA, "1", "onnx", str(magika_dir), 512, slots=32, processor="bytes-classification", cache=CacheEntry(ttl_s=600)),
        ModelEntry(GRADES, "1", "onnx", str(grades(minilm_dir, made / GRADES)), 256, slots=8, processor="text-classification"),
        ModelEntry(EVERYTHING, "1", "onnx", str(everything), 512, slots=8),
        ModelEntry(TYPED, "1", "onnx", str(typed), 512, slots=8),
        ModelEntry(BRAIN, "1", "onnx", str(brain), 512, slots=8),
    ) as found:  # fmt: skip
        yield found


@pytest.fixture(scope="module")
def made(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallModels]:
    """`picking` fails for what isn't in its table; `looping` has one instance, and takes as long as it is told."""
    folder = tmp_path_factory.mktemp("made")
    picking, looping = onnx_models.picking(folder / PICKING), onnx_models.looping(folder / LOOPING)
    alone = {"max_batch_size": 1, "instances": 1}
    with served(
        stack,
        ModelEntry(PICKING, "1", "onnx", str(picking), 512, slots=32, engine_args={"max_queue_delay_ms": 20}),
        ModelEntry(LOOPING, "1", "onnx", str(looping), 512, slots=LOOPING_SLOTS, partitions=1, engine_args=alone),
    ) as found:
        yield found
