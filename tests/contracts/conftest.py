"""What the contracts need of the world."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.artifacts import ensure_demo_model


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo model's folder, made in the data directory on the first run, which takes half a minute."""
    return ensure_demo_model(Path(os.environ.get("HEADRACE_DATA") or ".headrace"))
