"""Headrace's own programs as processes of their own, which find their modules where this process does, and in no other folder.

`python -m` alone would look into the working directory first: whoever works in a model's folder would run what lies there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def argv_of(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module; goes with `search_path`."""
    return (sys.executable, "-P", "-m", module, *arguments)


def search_path() -> dict[str, str]:
    """The environment that makes the command find the modules that this process finds."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if Path(path).is_absolute())}
