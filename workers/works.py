"""The works that a worker holds: taken from the log, and neither finished nor another's yet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from workers.group import Group, Held
from workers.job import Job
from workers.work import RequestKey, Work

LARGE_MAX = 16
"""Works from the object store that are held at once of a topic, waiting or running: the window counts their records' bytes and not theirs."""


class Works:
    """One of each request."""

    def __init__(self, group: Group, topics: Iterable[str]) -> None:
        """Nothing is held of these topics."""
        self._group = group
        self._held: dict[RequestKey, Work] = {}
        self._large = {topic: asyncio.Semaphore(LARGE_MAX) for topic in topics}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._held

    def find(self, key: RequestKey) -> Work | None:
        """The work of a request."""
        return self._held.get(key)

    def has(self, work: Work) -> bool:
        """Whether it is held still: it may have been cancelled meanwhile, or its partition lost."""
        return self._held.get(work.key) is work

    def hold(self, work: Work) -> None:
        """From now on."""
        self._held[work.key] = work

    async def large(self, held: Held) -> asyncio.Semaphore:
        """Waits for a place for one from the object store: to be released if it isn't held after all, and given back when it is let go."""
        places = self._large[held.tp.topic]
        await places.acquire()
        return places

    def finish(self, work: Work) -> None:
        """It is done: the log needn't give it to anybody again."""
        self._group.finish(work.held, work.offset)
        self.let_go(work)

    def let_go(self, work: Work) -> None:
        """It is done here, or was before."""
        if self.has(work):
            del self._held[work.key]
            if work.large:
                self._large[work.held.tp.topic].release()

    def lost(self, lost: Collection[Held]) -> list[Work]:
        """What is another's now is let go: that."""
        gone = set(map(id, lost))
        found = [work for work in self._held.values() if id(work.held) in gone]
        for work in found:
            self.let_go(work)
        return found

    def running(self) -> list[tuple[Work, Job]]:
        """What runs."""
        return [(work, work.job) for work in self._held.values() if work.job is not None]
