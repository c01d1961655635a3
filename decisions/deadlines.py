"""Who is answered by the clock: what hasn't begun at its deadline, and what runs beyond its time limit. And whose work is stopped: what was refused
after all, and what else was let in under an id that has ended.

A deadline is kept whatever the workers do. The word is written with `if_not_started`, so the fold ignores it where generation has begun
meanwhile; a time limit closes always. `Watch` is the bookkeeping of one `lifecycle` partition: records in, words out, and the offset below
which nothing is needed any more. It reads no clock and does no I/O.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from decisions.accounts import ANY_TIER, is_void, was_refused
from decisions.recalled import RECALLED_RECORDS
from schemas.events import (
    InferenceAdmitted,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceStarted,
    Reply,
)
from schemas.reasons import Reason
from schemas.topics import HOUR_MS, TIERS

Key = tuple[str, str, str]
"""Tenant, request id, and tier: another may have let the same id in."""
TOLD_AGAIN_MS = 10_000
"""A word that brought no ending is written again after this long,"""
TOLD_MAX = 5
"""so often in all; then the request is forgotten: its stream is gone."""
PASSED_MAX = 1_000
"""Times kept that mean nothing any more."""
WATCHED_MAX = 200_000
"""Requests of one partition; of more, the oldest is forgotten."""
STOPPED_WITHIN_MS = HOUR_MS
"""So long `control` keeps what workers are told; what is older than that when it is read needs no word."""


@dataclass(frozen=True, slots=True)
class Word:
    """What the clock says of a request: the ending for its caller's partition, and the cancel for the worker that runs it.

    What hasn't begun has no cancel: it may begin at this moment, and then the ending doesn't count. Workers keep deadlines too.
    """

    reply: Reply
    ending: InferenceFailed
    cancel: InferenceCancelled | None = None


@dataclass(slots=True)
class _Request:
    """`twice`: it was let in more than once, so it may be worked on more than once, and has one ending."""

    offset: int
    admitted: InferenceAdmitted
    due_ms: int = 0
    begun: bool = False
    told: int = 0
    twice: bool = False


class Watch:
    """The open requests of one `lifecycle` partition, by when the clock has something to say of each."""

    def __init__(self, start: int) -> None:
        """`start` is the offset of the first record that will be applied."""
        self._open: OrderedDict[Key, _Request] = OrderedDict()
        self._due: list[tuple[int, Key]] = []
        self._stops: deque[tuple[int, InferenceCancelled]] = deque(maxlen=WATCHED_MAX)
        self._ended: OrderedDict[Key, tuple[int, bool]] = OrderedDict()
        """Where the ending was told, and whether workers were told to stop then."""
        self._next = start

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._open)

    @property
    def committable(self) -> int:
        """The offset below which no open request has its admission."""
        oldest = next(iter(self._open.values()), None)
        return self._next if oldest is None else oldest.offset

    @property
    def next_due_ms(self) -> int | None:
        """When `due` may have something to say, in ms since 1970; None if nothing is open."""
        return self._due[0][0] if self._due else None

    def pass_over(self, below: int) -> None:
        """All records below this offset were applied, or can't be read."""
        self._next = max(self._next, below)

    def apply(self, offset: int, timestamp_ms: int, event: object) -> None:
        """One record of the partition, in order. Whatever says nothing of a request's time is passed over."""
        self.pass_over(offset + 1)
        self._forget_ended()
        match event:
            case InferenceAdmitted() if not is_void(event, timestamp_ms):
                self._admitted(offset, timestamp_ms, event)
            case InferenceStarted():
                self._begun((event.tenant, event.request_id, event.tier), timestamp_ms)
            case InferenceCompleted() | InferenceFailed():
                tiers = TIERS if event.tier == ANY_TIER else (event.tier,)
                keys = [(event.tenant, event.request_id, tier) for tier in tiers]
                ended = [request for key in keys if (request := self._open.pop(key, None)) is not None]
                stops = was_refused(event) or any(request.twice for request in ended)
                if stops:
                    self._stop(event, timestamp_ms)
                self._ended.update(dict.fromkeys(keys, (offset, stops)))

    def _admitted(self, offset: int, timestamp_ms: int, event: InferenceAdmitted) -> None:
        """What is let in under an id that is open has the other's ending; under one that has ended nobody waits for it."""
        key = event.tenant, event.request_id, event.tier
        ended_at, stops = self._ended.get(key, (0, True))
        if not stops:
            self._stop(event, timestamp_ms)
            self._ended[key] = ended_at, True
        if (request := self._open.get(key)) is not None:
            request.twice = True
            return
        self._open[key] = _Request(offset, event)
        self._plan(key, event.deadline_ms)
        if len(self._open) > WATCHED_MAX:
            self._open.popitem(last=False)

    def _stop(self, event: InferenceAdmitted | InferenceCompleted | InferenceFailed, timestamp_ms: int) -> None:
        self._stops.append((timestamp_ms, InferenceCancelled(event.request_id, event.tenant)))

    def _forget_ended(self) -> None:
        """For as long as whoever lets in remembers what has ended."""
        while self._ended and next(iter(self._ended.values()))[0] < self._next - RECALLED_RECORDS:
            self._ended.popitem(last=False)

    def _begun(self, key: Key, timestamp_ms: int) -> None:
        request = self._open.get(key)
        if request is None or request.begun:
            return
        if request.admitted.time_limit_ms is None:
            del self._open[key]
            return
        request.begun, request.told = True, 0
        self._plan(key, timestamp_ms + request.admitted.time_limit_ms)

    def _plan(self, key: Key, due_ms: int) -> None:
        self._open[key].due_ms = due_ms
        heapq.heappush(self._due, (due_ms, key))
        if len(self._due) > 2 * len(self._open) + PASSED_MAX:
            self._due = [(request.due_ms, name) for name, request in self._open.items()]
            heapq.heapify(self._due)

    def due(self, now_ms: int, words_max: int) -> list[Word]:
        """What is to be said now, so many words at most; each is due again later, unless its ending comes."""
        words: list[Word] = []
        while self._due and self._due[0][0] <= now_ms and len(words) < words_max:
            due_ms, key = heapq.heappop(self._due)
            request = self._open.get(key)
            if request is None or request.due_ms != due_ms:
                continue
            if request.told == TOLD_MAX:
                del self._open[key]
                continue
            request.told += 1
            self._plan(key, now_ms + TOLD_AGAIN_MS)
            words.append(word(request.admitted, begun=request.begun))
        return words

    def stops(self, now_ms: int, words_max: int) -> list[InferenceCancelled]:
        """What workers are to be told now, so many words at most: these requests were let in, and then their callers heard a refusal, or were let in
        more than once and have ended. Their work may wait for a worker still, or one has begun it and makes what nobody hears.
        """
        words: list[InferenceCancelled] = []
        while self._stops and len(words) < words_max:
            told_ms, cancel = self._stops.popleft()
            if now_ms < told_ms + STOPPED_WITHIN_MS:
                words.append(cancel)
        return words


def word(admitted: InferenceAdmitted, *, begun: bool) -> Word:
    """What the clock says of a request that hasn't begun at its deadline, or runs beyond its time limit."""
    reason = Reason.TIME_LIMIT_EXCEEDED if begun else Reason.DEADLINE_EXCEEDED
    ending = InferenceFailed(
        admitted.request_id,
        admitted.tenant,
        admitted.model,
        admitted.version,
        admitted.tier,
        reason.value,
        reason.text,
        source="timer",
    )
    if not begun:
        return Word(admitted.reply, replace(ending, if_not_started=True))
    return Word(admitted.reply, ending, InferenceCancelled(admitted.request_id, admitted.tenant))
