"""How many processor cores this process may use: what its affinity and its control group leave it, which a container's limit sets."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(root: Path = CGROUP) -> int:
    """At least 1. `root` is where control groups are mounted, of version 2 or 1."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    quota = _quota_of(root)
    return max(1, allowed if quota is None else min(allowed, round(quota)))


def _quota_of(root: Path) -> float | None:
    """Cores' worth of time that the control group may use, or None."""
    two = _words(root / "cpu.max")
    if len(two) == 2 and two[0].isdecimal() and int(two[1]) > 0:
        return int(two[0]) / int(two[1])
    quota, period = _words(root / "cpu" / "cpu.cfs_quota_us"), _words(root / "cpu" / "cpu.cfs_period_us")
    if quota and period and quota[0].isdecimal() and int(period[0]) > 0:
        return int(quota[0]) / int(period[0])
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
