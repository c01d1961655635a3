from __future__ import annotations

import importlib.metadata
import itertools
from pathlib import Path

from bench.llm import VLLM_VERSION, _arguments, _dist_info, _judge, _rows
from bench.load import Result, Sample
from infra.models_file import ModelEntry

ENTRY = ModelEntry(
    "small", "1", "vllm", "/models/small", 2048, slots=32, engine_args={"dtype": "bfloat16", "enforce_eager": True}
)


def test_the_peer_gets_the_workers_engine_arguments() -> None:
    arguments = _arguments(ENTRY, Path("/models/small"), 8001)

    assert arguments[:2] == ["serve", "/models/small"]
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--port"] == "8001"
    assert pairs["--served-model-name"] == "small"
    assert pairs["--max-model-len"] == "2048"
    assert pairs["--max-num-seqs"] == "32"
    assert pairs["--dtype"] == "bfloat16"
    assert arguments[-1] == "--enforce-eager"


def test_the_peer_is_told_its_version(tmp_path: Path) -> None:
    path = _dist_info(tmp_path)

    (found,) = importlib.metadata.distributions(name="vllm", path=[path])
    assert found.version == VLLM_VERSION


def test_rows_pool_the_passes(capsys: object) -> None:
    def passes(first_s: float) -> dict[int, list[Result]]:
        sample = Sample(0.0, first_s=first_s, last_s=first_s + 6.3, tokens=64)
        return {8: [Result(8, [sample], 8.0), Result(8, [sample], 8.0)]}

    ours, theirs = passes(0.2), passes(0.1)
    rows = _rows(ours, theirs)

    assert [(row.metric, row.at, row.ours, row.theirs) for row in rows] == [
        ("output_tokens_per_s", "8", 8.0, 8.0),
        ("ttft_p50_ms", "8", 200.0, 100.0),
        ("itl_p50_ms", "8", 100.0, 100.0),
    ]
    _judge(ours, theirs)
