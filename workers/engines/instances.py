"""Instances of a model: a thread each, that runs one batch at a time and says how it went for every part in it.

A batch that fails runs again part by part, so that only the part at fault fails and the others get what they get alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from schemas.errors import HeadraceError
from workers.engines.arrays import Array
from workers.engines.onnx_session import Session
from workers.engines.port import EngineError
from workers.processors.port import Part, Processor

log = structlog.get_logger("onnx")

Outcome = Sequence[Array] | HeadraceError | None
"""Of a part: what `Processor.reduce` gave of its rows, or why not; None if nobody waited for it any more."""


@dataclass(slots=True, eq=False)
class Member:
    """A part in a batch. `gone` is set, by the event loop, once nobody waits for it."""

    part: Part
    deadline_ms: float
    gone: bool = False


@dataclass(slots=True)
class _Attempt:
    """One call of the model, for some of a batch."""

    members: Sequence[Member]
    options: Any
    stopped: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """What an instance runs. `outcomes` stand in the order of `members`; `unequal` says that rows couldn't be told apart in the outputs."""

    members: Sequence[Member]
    outcomes: list[Outcome] = field(default_factory=list)
    model_ms: float = 0
    unequal: bool = False
    ended: bool = False
    _attempt: _Attempt | None = None

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(member.part.rows for member in self.members)

    def stop_for(self, member: Member | None = None) -> bool:
        """Ends the present call of the model if nobody waits for what is in it, or if `member` is. Whether there was one to end."""
        attempt = self._attempt
        if attempt is None or attempt.stopped:
            return False
        if member in attempt.members or all(each.gone for each in attempt.members):
            attempt.stopped = True
            attempt.options.terminate = True
            return True
        return False

    def run(self, session: Session, processor: Processor) -> None:
        """Fills `outcomes`. Blocks."""
        done = self._call(session, processor, self.members)
        if done is None:
            done = {}
            for member in self.members:
                done.update(self._call(session, processor, [member]) or {})
        self._attempt = None
        self.outcomes = [done.get(member) for member in self.members]

    def _call(self, session: Session, processor: Processor, members: Sequence[Member]) -> dict[Member, Outcome] | None:
        """The outcomes of some members in one call of the model; None if it failed for several at once."""
        attempt = self._begin(session, members)
        live = attempt.members
        if not live:
            return {}
        started_s = time.perf_counter()
        try:
            feeds = processor.feeds([member.part.payload for member in live])
            outputs = session.run(feeds, live[0].part.fetch, attempt.options)
            reduced = processor.reduce(outputs, feeds)
            return {live[0]: reduced} if len(live) == 1 else self._cut(reduced, live)
        except HeadraceError as error:
            return {live[0]: error} if len(live) == 1 else None
        except Exception as error:
            log.exception("the processor failed")
            wrapped = EngineError(f"the processor failed: {type(error).__name__}: {error}")
            return {live[0]: wrapped} if len(live) == 1 else None
        finally:
            self.model_ms += (time.perf_counter() - started_s) * 1000

    def _begin(self, session: Session, members: Sequence[Member]) -> _Attempt:
        """An attempt for those that are still waited for. Who leaves once it is told finds it in `stop_for`; who left before isn't in it."""
        while True:
            live = [member for member in members if not member.gone]
            attempt = self._attempt = _Attempt(live, session.options())
            if not any(member.gone for member in live):
                return attempt

    def _cut(self, reduced: Sequence[Array], members: Sequence[Member]) -> dict[Member, Outcome] | None:
        """Each member's own rows."""
        total = sum(member.part.rows for member in members)
        if any(not array.ndim or array.shape[0] != total for array in reduced):
            self.unequal = True
            return None
        outcomes: dict[Member, Outcome] = {}
        at = 0
        for member in members:
            outcomes[member] = [array[at : at + member.part.rows] for array in reduced]
            at += member.part.rows
        return outcomes


class Instance:
    """A thread with a session. `ended` is called in it with each batch that is done."""

    def __init__(self, session: Session, processor: Processor, ended: Callable[[Instance, Batch], None]) -> None:
        """Starts the thread."""
        self.batch: Batch | None = None
        self._session = session
        self._processor = processor
        self._ended = ended
        self._next: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="onnx", daemon=True)
        self._thread.start()

    def give(self, batch: Batch) -> None:
        """Runs it next; the instance must be idle."""
        assert self.batch is None
        self.batch = batch
        self._next.put(batch)

    def leave(self) -> None:
        """Ends the thread, after what runs."""
        self._next.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (batch := self._next.get()) is not None:
            batch.run(self._session, self._processor)
            self._ended(self, batch)
