"""What waits for a slot and what is under way, and whose turn it is: `decisions.window.choose`."""

from __future__ import annotations

from collections.abc import Callable

from decisions.window import Room, Waiting, choose
from workers.job import Job
from workers.work import Work


class Turns:
    """Keeps both, and starts nothing. A job is under way from `begin` to `end`: until the broker has confirmed all that it wrote."""

    def __init__(self, room: Callable[[], Room]) -> None:
        """Nothing waits and nothing is under way. `room` tells for whom slots are kept at present."""
        self._room = room
        self._waiting: list[Work] = []
        self._under_way: dict[Job, Waiting] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def wait(self, work: Work) -> None:
        """One more waits."""
        self._waiting.append(work)

    def drop(self, work: Work) -> None:
        """It no longer waits, if it did."""
        if work in self._waiting:
            self._waiting.remove(work)

    def drop_late(self, now_ms: int) -> list[Work]:
        """Those past their deadline, which no longer wait."""
        late = [work for work in self._waiting if work.late(now_ms)]
        for work in late:
            self._waiting.remove(work)
        return late

    def take(self) -> Work | None:
        """The work to begin now, which no longer waits; None if none may begin beside what is under way."""
        index = choose([work.waiting for work in self._waiting], list(self._under_way.values()), self._room())
        return None if index is None else self._waiting.pop(index)

    def begin(self, job: Job, work: Work) -> None:
        """A job is under way."""
        self._under_way[job] = work.waiting

    def end(self, job: Job) -> None:
        """It no longer is."""
        self._under_way.pop(job, None)
