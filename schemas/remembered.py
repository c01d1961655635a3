"""What is made of things that stay the same for long, remembered by which things they are.

`functools.lru_cache` asks each thing for its hash, which for a tenant's quotas is more work than most checks of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Remembered(Generic[Made]):
    """`make(one, other, *names)`, made once for each pair of things, by identity, and names, by value. The things must not change."""

    def __init__(self, make: Callable[..., Made], kept_max: int) -> None:
        """No more than `kept_max` are remembered; then it begins anew."""
        self._make = make
        self._kept_max = kept_max
        # The things are held, so that nothing else can have their identity meanwhile.
        self._kept: dict[tuple[object, ...], tuple[object, object, Made]] = {}

    def __call__(self, one: object, other: object, *names: str) -> Made:
        """What was made of them, or is made now."""
        key = id(one), id(other), *names
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= self._kept_max:
                self._kept.clear()
            found = self._kept[key] = one, other, self._make(one, other, *names)
        return found[2]
