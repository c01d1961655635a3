"""The broker's classes, loaded and linked once and then mapped by each later start: less than half of a start's CPU.

An archive holds for one Java, one list of jars and one set of options, which its name tells; it is named by its digest too, so what
is there under that name is whole or not taken. It is made by this file as a program of its own, at the lowest priority, of the list
of classes that a broker wrote while it started. Nothing here makes a start fail: without an archive Java starts in the ordinary way.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

OLDEST_JAVA = 25
BYTES_FREE_MIN = 512 * 1024 * 1024
ARCHIVES_KEPT = 3  # of 65 MB each: a cache may serve several installations
QUIET = ("-Xlog:disable", "-Xlog:all=warning,cds*=off,aot*=off:stdout")


class ClassArchive:
    """The archive for one command line, in `folder`. `options` come after `java` and name neither a class nor the class path."""

    def __init__(self, folder: Path, java: Path, options: Sequence[str], jars: Sequence[Path]) -> None:
        self._folder = folder
        self._java = java
        self._command = [str(java), *options, "-cp", os.pathsep.join(map(str, jars))]
        self._name = f"classes-{self._key(jars)}"

    @property
    def failed(self) -> Path:
        """Exists where making it failed: it isn't tried again."""
        return self._folder / f"{self._name}.failed"

    def find(self) -> Path | None:
        """The archive if there is a whole one; what is broken is removed."""
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob(f"{self._name}-*.jsa")):
                if path.name == self._named(_digest(path)):
                    return path
                path.unlink()
        return None

    def using(self) -> list[str]:
        """Java's options for a start with the archive, or none."""
        path = self.find()
        return [] if path is None else [f"-XX:SharedArchiveFile={path}", *QUIET]

    def wanted(self) -> bool:
        """Whether one should be made. Call it where there is none."""
        with contextlib.suppress(OSError, ValueError):
            able = _java_version(self._java) >= OLDEST_JAVA and os.access(self._folder, os.W_OK)
            return able and not self.failed.exists() and shutil.disk_usage(self._folder).free > BYTES_FREE_MIN
        return False

    def making(self, classes: Path) -> list[str]:
        """The command of the program that makes it of the list `classes`, which the broker goes on writing."""
        return [
            sys.executable,
            "-I",
            "-S",
            __file__,
            str(self._folder),
            self._name,
            str(classes),
            json.dumps(self._command),
        ]

    def _named(self, digest: str) -> str:
        return f"{self._name}-{digest}.jsa"

    def _key(self, jars: Sequence[Path]) -> str:
        home = self._java.parent.parent
        files = [home / "release", home / "lib" / "modules", home / "lib" / "server" / "libjvm.so", *jars]
        stats = [(file.stat().st_size, file.stat().st_mtime_ns) if file.exists() else None for file in files]
        return hashlib.sha256(json.dumps([self._command, stats]).encode()).hexdigest()[:16]


def _java_version(java: Path) -> int:
    for line in (java.parent.parent / "release").read_text().splitlines():
        if line.startswith("JAVA_VERSION="):
            return int(line.partition("=")[2].strip('"').split(".")[0])
    return 0


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def make(folder: Path, name: str, classes: Path, command: list[str]) -> None:
    """Makes the archive beside its place and renames it. Of several at once, one does it; a killed one leaves nothing in the way."""
    with (folder / "classes.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if any(folder.glob(f"{name}-*.jsa")):
            return
        listed, fresh = folder / "classes.making.lst", folder / "classes.making.jsa"
        try:
            listed.write_bytes(classes.read_bytes().rpartition(b"\n")[0] + b"\n")  # its last line may be half a line
            options = ["-Xshare:dump", "-XX:+AOTClassLinking", f"-XX:SharedClassListFile={listed}"]
            dump = [command[0], *options, f"-XX:SharedArchiveFile={fresh}", "-Xlog:disable", *command[1:]]
            quiet = subprocess.DEVNULL
            done = subprocess.run(dump, stdin=quiet, stdout=quiet, stderr=quiet, check=False)
            if done.returncode == 0 and fresh.exists():
                fresh.replace(folder / f"{name}-{_digest(fresh)}.jsa")
            else:
                (folder / f"{name}.failed").touch()
        finally:
            listed.unlink(missing_ok=True)
            fresh.unlink(missing_ok=True)
        for old in sorted(folder.glob("classes-*.jsa"), key=lambda path: path.stat().st_mtime)[:-ARCHIVES_KEPT]:
            old.unlink()


if __name__ == "__main__":
    os.nice(19)
    with contextlib.suppress(OSError):
        make(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
