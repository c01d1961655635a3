"""A Redis of its own for tests: Debian's `redis-server` as a child process on a free port. Without it tests skip, but fail when CI is set."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.ports import free_port

WAIT_S = 20.0
PASSWORD = "open-sesame"


@dataclass
class RedisServer:
    """Keeps nothing on disk, and asks for a password."""

    folder: Path
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What the setting takes."""
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when it answers; skips the test where there is no Redis."""
        program = shutil.which("redis-server")
        if program is None:
            assert not os.environ.get("CI"), "install Debian's redis-server"
            pytest.skip("redis-server is not installed")
        settings = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "requirepass": PASSWORD}
        arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([program, *arguments], cwd=self.folder, stdout=log, stderr=log)
        end_s = time.monotonic() + WAIT_S
        while not self._answers():
            assert time.monotonic() < end_s, (self.folder / "redis.log").read_text()
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as link:
                link.sendall(f"AUTH {PASSWORD}\r\nPING\r\n".encode())
                return b"+OK" in link.recv(100)
        except OSError:
            return False

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
