"""Objects as files below a folder, which its owner alone can read: for one machine, or a file system that all machines mount."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from infra.objects import Listed, ObjectMissing, ObjectStore, StoreAway

UNFINISHED = "unfinished-"
"""How the name of a file begins that a put has not finished."""


class FolderStore(ObjectStore):
    """See the module. The folder is made when something is first put."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the folder {folder}")
        self._folder = folder.absolute()

    def _put(self, key: str, body: bytes) -> None:
        path = self._folder / key
        try:
            self._make(path.parent)
            handle, name = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)  # 0600
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).replace(path)
            except BaseException:
                with suppress(OSError):
                    Path(name).unlink()
                raise
            _sync_folder(path.parent)
        except OSError as error:
            raise self._away(error) from error

    def _make(self, folder: Path) -> None:
        """With `parents`, mkdir would give those the mode of the umask."""
        missing = [folder, *folder.parents]
        for each in reversed([path for path in missing if path == self._folder or self._folder in path.parents]):
            if each == self._folder:
                each.parent.mkdir(parents=True, exist_ok=True)
            each.mkdir(mode=0o700, exist_ok=True)

    def _get(self, key: str, bytes_max: int) -> bytes:
        try:
            with (self._folder / key).open("rb") as file:
                return file.read(bytes_max)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissing(key) from None
        except OSError as error:
            raise self._away(error) from error

    def _delete(self, key: str) -> None:
        try:
            (self._folder / key).unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise self._away(error) from error

    def _page(self, prefix: str, page: str) -> tuple[list[Listed], str | None]:
        """All at once. What a put that was killed left is listed too, so that it gets swept."""
        del page
        try:
            return list(self._files(prefix)), None
        except OSError as error:
            raise self._away(error) from error

    def _files(self, prefix: str) -> Iterator[Listed]:
        start = self._folder / prefix
        for folder, _, names in os.walk(start if start.is_dir() else start.parent):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self._folder).as_posix()
                if key != prefix and not key.startswith(f"{prefix}/"):
                    continue
                with suppress(FileNotFoundError):
                    found = path.stat()
                    yield Listed(key, found.st_size, found.st_mtime_ns // 1_000_000)

    def _away(self, error: OSError) -> StoreAway:
        return StoreAway(f"{self.name} can't be used: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    """So that the name, too, outlives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
