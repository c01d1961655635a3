"""What is wrong with a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, in words for the caller, and the field at fault."""

    message: str
    param: str
    too_large: bool = False
