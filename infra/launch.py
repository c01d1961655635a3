"""Two small programs that the supervisor starts, with nothing imported but the standard library.

    launch.py exec PARENT_PID COMMAND [ARG]...   becomes COMMAND, which the kernel kills when the supervisor dies
    launch.py guard                              kills the process groups it is told about when its standard input ends

The kernel's signal reaches only the child itself, not what the child started: that is the guard's part. It reads lines
`+PGID` and `-PGID`; the end of its input means that the supervisor is gone, in whatever way.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NO_SUCH_COMMAND = 127


def become(parent: int, argv: list[str]) -> None:
    """Replaces this process by argv, to be killed with its parent. Exits NO_SUCH_COMMAND if the command can't be started."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        pass  # No prctl off Linux; the guard is left.
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"can't start {argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NO_SUCH_COMMAND)


def guard() -> None:
    """Waits for the end of standard input, then kills every process group still named."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard()
    else:
        become(int(sys.argv[2]), sys.argv[3:])
