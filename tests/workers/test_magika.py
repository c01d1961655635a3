"""Files' labels are those of the `magika` package itself, whatever shares their batch."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from magika import Magika
from magika.types import Seekable

from infra.onnx_args import OnnxArgs
from infra.onnx_signature import FileSignature, public_signature, read_signature
from schemas.errors import HeadraceError
from schemas.events import Tensor, TensorSpec
from schemas.tensors import pack
from tests.workers.onnx_site import array, request, serving, tensor
from workers.processors.choice import make_processor
from workers.processors.files import Features

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    (ROOT / "README.md").read_bytes(),
    Path(__file__).read_bytes(),
    (ROOT / "pyproject.toml").read_bytes(),
    b"PK\x03\x04" + bytes(range(256)) * 40,
    b" \n" * 5_000 + b"select * from t where a = 1;\n" * 3,
    b"%PDF-1.7\n" + b"1 0 obj << /Type /Catalog >>\n" * 100,
    b"12345678",
)
SMALL = (b"", b"short", b"\xff\xfe", b"   \n\t  " * 50, b" " * 5_000, b"\xff" + b" " * 30)


@pytest.fixture(scope="module")
def magika() -> Magika:
    return Magika()


@pytest.fixture(scope="module")
def features() -> Features:
    return Features(beg_size=1024, end_size=1024, block_size=4096, padding_token=256, min_file_size_for_dl=8)


@pytest.fixture(scope="module")
def file(magika_dir: Path) -> FileSignature:
    return read_signature(magika_dir)


def files(*contents: bytes) -> Tensor:
    return Tensor("bytes", "BYTES", (len(contents),), pack(contents))


async def test_labels_and_scores_are_the_packages_own(magika_dir: Path, magika: Magika) -> None:
    async with serving(magika_dir, "bytes-classification") as engine:
        whole = await engine.infer(request(files(*FILES, *SMALL), top_k=2))
        alone = await asyncio.gather(*(engine.infer(request(files(each), top_k=2)) for each in FILES))
    assert array(whole, "label").shape == array(whole, "score").shape == (len(FILES) + len(SMALL), 2)
    for content, label, score in zip((*FILES, *SMALL), array(whole, "label"), array(whole, "score"), strict=True):
        said = magika.identify_bytes(content).prediction
        expected = said.dl.label if said.dl.label != "undefined" else said.output.label
        assert label[0] == expected
        assert score[0] == pytest.approx(said.score, abs=1e-5)
    for index, result in enumerate(alone):
        assert array(result, "label").tolist() == array(whole, "label")[index : index + 1].tolist()
        assert np.allclose(array(result, "score"), array(whole, "score")[index], atol=1e-5)


async def test_without_a_wish_all_labels_come_best_first(magika_dir: Path) -> None:
    async with serving(magika_dir, "bytes-classification") as engine:
        result = await engine.infer(request(files(FILES[0], b"tiny"), top_k=100_000))
    labels, scores = array(result, "label"), array(result, "score")
    assert labels.shape == (2, 214)
    assert sorted(labels[0]) == sorted(set(labels[0]))
    assert (labels[1][0], scores[1][0], sum(scores[1])) == ("txt", 1, 1)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert scores[0].sum() == pytest.approx(1, abs=1e-4)


@given(
    content=st.one_of(
        st.binary(max_size=64),
        st.builds(lambda a, b, n: a * n + b, st.binary(max_size=9), st.binary(max_size=20), st.integers(0, 900)),
    )
)
def test_features_are_the_packages_own(features: Features, magika: Magika, content: bytes) -> None:
    row = features.row(content)
    done, made = magika._get_result_or_features_from_seekable(Seekable(io.BytesIO(content)))
    if row is None:
        assert made is None
        assert done is not None
        assert str(done.prediction.output.label) == features.name(content)
    else:
        assert made is not None
        assert row.tolist() == [*made.beg, *made.end]


async def test_the_raw_model_gives_what_onnx_runtime_gives(magika_dir: Path, features: Features) -> None:
    """Of few bytes its scores differ by what shares the batch: nobody has to say so."""
    few = [bytes(range(at, at + 16)) for at in range(97, 107)]
    rows = np.stack([row for each in (*FILES, *few) if (row := features.row(each)) is not None])
    session = onnxruntime.InferenceSession(magika_dir / "model.onnx", providers=["CPUExecutionProvider"])
    expected = np.stack([session.run(None, {"bytes": row[None]})[0][0] for row in rows])
    assert np.abs(session.run(None, {"bytes": rows})[0] - expected).max() > 1e-4
    async with serving(magika_dir, max_queue_delay_ms=20) as engine:
        asked = [rows[at : at + 1] for at in range(len(rows))] + [rows]
        found = await asyncio.gather(*(engine.infer(request(tensor("bytes", "INT32", each))) for each in asked))
    scores = [array(result, "target_label") for result in found]
    assert np.allclose(np.concatenate(scores[:-1]), expected, rtol=0, atol=1e-5)
    assert np.allclose(scores[-1], expected, rtol=0, atol=1e-5)


def test_its_signature(file: FileSignature) -> None:
    assert file.batched
    assert public_signature("", file) == (
        (TensorSpec("bytes", "INT32", (-1, 2048)),),
        (TensorSpec("target_label", "FP32", (-1, 214)),),
    )
    assert public_signature("bytes-classification", file) == (
        (TensorSpec("bytes", "BYTES", (-1,)),),
        (TensorSpec("label", "BYTES", (-1, -1)), TensorSpec("score", "FP32", (-1, -1))),
    )


@pytest.mark.parametrize(
    "changes", [{"mid_size": 8}, {"use_inputs_at_offsets": True}, {"beg_size": None}, {"beg_size": 7}]
)
def test_a_configuration_that_does_not_fit_is_refused(
    magika_dir: Path, file: FileSignature, tmp_path: Path, changes: dict[str, object]
) -> None:
    config = json.loads((magika_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(HeadraceError, match=r"config\.json"):
        make_processor("bytes-classification", file, tmp_path, OnnxArgs(), 1)


def test_the_wrong_processor_is_refused(file: FileSignature) -> None:
    with pytest.raises(HeadraceError, match="the processor text-embedding is for a model with input_ids"):
        public_signature("text-embedding", file)
    with pytest.raises(HeadraceError, match="no processor 'x'; there are text-embedding"):
        public_signature("x", file)
