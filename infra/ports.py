"""TCP ports on this machine: is one free, and if not, who holds it."""

from __future__ import annotations

import errno
import socket
from collections import deque

import psutil

from schemas.errors import HeadraceError
from schemas.reasons import Reason

BACKLOG = 128
GIVEN_MAX = 256
_given: deque[int] = deque(maxlen=GIVEN_MAX)


class PortInUse(HeadraceError):
    """Another process listens where one of ours should.

    Attributes:
        port: the TCP port.
    """

    def __init__(self, port: int, holder: str | None, purpose: str | None = None) -> None:
        who = holder or "another process, of which this user may not see more"
        what = f" ({purpose})" if purpose else ""
        super().__init__(Reason.CONFLICT, f"port {port}{what} is in use by {who}; stop it or choose another port")
        self.port = port


def holder(port: int) -> str | None:
    """`name (pid N)` of the process that listens on the port; None if nobody does or it can't be seen."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return None
    for connection in connections:
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr[1] == port
            and connection.pid
        ):
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return None


def bind(port: int, host: str = "127.0.0.1", purpose: str | None = None) -> socket.socket:
    """A listening socket on the port (0 takes any free one). Raises PortInUse, which names the holder."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(port, holder(port), purpose) from error
        raise HeadraceError(Reason.INVALID_REQUEST, f"can't listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def require_free(port: int, host: str = "127.0.0.1", purpose: str | None = None) -> None:
    """Raises PortInUse unless the port is free at this moment."""
    bind(port, host, purpose).close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, and that none of the last `GIVEN_MAX` calls gave: whoever got it may not listen yet."""
    while True:
        with bind(0, host) as listener:
            port = int(listener.getsockname()[1])
        if port not in _given:
            _given.append(port)
            return port
