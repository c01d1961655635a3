"""What a part of this process that nobody else can ask has against the process's being ready."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_held: dict[object, str] = {}


@contextlib.contextmanager
def objecting(text: str) -> Iterator[None]:
    """Within it the process isn't ready, for this reason."""
    own = object()
    _held[own] = text
    try:
        yield
    finally:
        del _held[own]


def objection() -> str | None:
    """All of them, or None."""
    return "; ".join(sorted(set(_held.values()))) or None
