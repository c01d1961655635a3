"""What was told of late, by name: of each name the last, for a while, and of so many names at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Told = TypeVar("Told")


class Recent(Generic[Told]):
    """Remembers what is put for `kept_s` at least and twice as long at most, or until half of `kept_max` other names were put after it.

    Two dictionaries take turns, and the older one goes as a whole: to let each name go at its own time costs several times what it takes to put it.
    """

    def __init__(self, kept_max: int, kept_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._half, self._kept_s, self._clock = kept_max // 2, kept_s, clock
        self._newer: dict[str, Told] = {}
        self._older: dict[str, Told] = {}
        self._turn_s = clock() + kept_s

    def put(self, name: str, told: Told) -> None:
        """The last that is told of a name."""
        if len(self._newer) >= self._half or self._clock() >= self._turn_s:
            self._turn()
        self._newer[name] = told

    def get(self, name: str) -> Told | None:
        """What was told of a name last; None if that is long ago."""
        if self._clock() >= self._turn_s:
            self._turn()
        found = self._newer.get(name)
        return found if found is not None else self._older.get(name)

    def _turn(self) -> None:
        now_s, due_s = self._clock(), self._turn_s
        self._older = self._newer if now_s < due_s + self._kept_s else {}
        self._newer = {}
        self._turn_s = (due_s if due_s <= now_s < due_s + self._kept_s else now_s) + self._kept_s

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)
