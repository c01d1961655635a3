"""Instances of a model: a thread each, that runs one batch at a time and says of every part how it went, as soon as that is known.

A batch that fails runs again in halves, and these in halves, so that only the part at fault fails and the others get what they get alone: of
n parts one at fault costs about 2·log2(n) runs, and if all are, there are 2n - 1. Halving says little where a run was too long, as each
further one may last as long: then each part runs by itself, which costs the limit once more for each that is at fault.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from schemas.errors import HeadraceError
from workers.engines.arrays import Array
from workers.engines.onnx_session import Session
from workers.engines.port import EngineError
from workers.processors.port import Part, Processor

log = structlog.get_logger("onnx")

Outcome = Sequence[Array] | HeadraceError
"""Of a part: what `Processor.reduce` gave of its rows, or why not."""


@dataclass(slots=True, eq=False)
class Member:
    """A part in a batch. `gone` is set, by the event loop, once nobody waits for it."""

    part: Part
    deadline_ms: float
    gone: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    """One run of the model, for some of a batch. The event loop sets `stopped` when it ends it, and `long` once it has lasted too long."""

    members: Sequence[Member]
    options: Any
    begun_ms: float
    stopped: bool = False
    long: bool = False

    def stop(self) -> None:
        """Ends it before its next node."""
        self.stopped = True
        self.options.terminate = True


@dataclass(frozen=True, slots=True)
class Told:
    """What a run came to.

    Attributes:
        outcomes: of the members that are done with it; none if the run failed for several at once, or nobody waited any more.
        rows: of the run.
        model_ms: what the batch's runs have taken so far.
        last: whether the batch is done.
    """

    outcomes: Mapping[Member, Outcome]
    rows: int
    model_ms: float
    last: bool


@dataclass(slots=True, eq=False)
class Batch:
    """What an instance runs. `unequal` says that rows couldn't be told apart in the outputs; `ended`, the event loop's, that all is told."""

    members: Sequence[Member]
    unequal: bool = False
    ended: bool = False
    _model_ms: float = 0
    _attempt: Attempt | None = None

    def runs(self, attempt: Attempt) -> bool:
        """Whether that is the present run."""
        return self._attempt is attempt

    def limit_ms(self, max_run_ms: float) -> float:
        """A time, by `now_ms`, before which `stop_long` finds nothing."""
        attempt = self._attempt
        begun_ms = now_ms() if attempt is None or attempt.long else attempt.begun_ms
        return begun_ms + max_run_ms

    def stop_for(self, member: Member | None = None) -> Attempt | None:
        """Ends the present run if nobody waits for what is in it, or if `member` is. The run, if there was one to end."""
        attempt = self._attempt
        if attempt is None or attempt.stopped:
            return None
        if member in attempt.members or all(each.gone for each in attempt.members):
            attempt.stop()
            return attempt
        return None

    def stop_long(self, max_run_ms: float) -> Attempt | None:
        """Ends the present run if it has lasted for `max_run_ms`. The run, if there was one to end."""
        attempt = self._attempt
        if attempt is None or attempt.long or attempt.begun_ms + max_run_ms > now_ms():
            return None
        attempt.long = True
        if attempt.stopped:
            return None
        attempt.stop()
        return attempt

    def run(self, session: Session, processor: Processor) -> Iterator[Told]:
        """Runs the members together, then, while that fails, fewer of them, those that are first in line first. Blocks."""
        pieces = [self.members]
        while pieces:
            attempt = self._begin(session, pieces.pop())
            outcomes = self._call(session, processor, attempt) if attempt.members else {}
            self._attempt = None  # the event loop, once told, finds no run that has ended
            if outcomes is None:
                pieces += reversed(self._smaller(attempt))
            if outcomes or not pieces:
                rows = sum(member.part.rows for member in attempt.members)
                yield Told(outcomes or {}, rows, self._model_ms, last=not pieces)

    def _smaller(self, attempt: Attempt) -> list[Sequence[Member]]:
        """What runs instead of a run that failed, in the order of turns."""
        live = [member for member in attempt.members if not member.gone]
        size = 1 if self.unequal or attempt.long else (len(live) + 1) // 2
        return [live[at : at + size] for at in range(0, len(live), max(1, size))]

    def _call(self, session: Session, processor: Processor, attempt: Attempt) -> dict[Member, Outcome] | None:
        """The outcomes of a run; None if it failed for several at once."""
        live = attempt.members
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
            self._model_ms += (time.perf_counter() - started_s) * 1000

    def _begin(self, session: Session, members: Sequence[Member]) -> Attempt:
        """A run for those that are still waited for. Who leaves once it is told finds it in `stop_for`; who left before isn't in it."""
        while True:
            live = [member for member in members if not member.gone]
            attempt = self._attempt = Attempt(live, session.options(), now_ms())
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
    """A thread with a session. `tell` is called in it with what becomes known of a batch."""

    def __init__(self, session: Session, processor: Processor, tell: Callable[[Instance, Batch, Told], None]) -> None:
        """Starts the thread."""
        self.batch: Batch | None = None
        self._session = session
        self._processor = processor
        self._tell = tell
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
            for told in batch.run(self._session, self._processor):
                self._tell(self, batch, told)


def now_ms() -> float:
    """The clock of batches: it never goes back."""
    return time.monotonic() * 1000
