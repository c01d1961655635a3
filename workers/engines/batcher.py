"""The batcher's shell: puts parts of requests into the queue, gives idle instances their batches, and tells callers how it went.

Runs in one event loop. A waiting part whose deadline comes fails then, whatever runs. One that runs is given `GRACE_MS` more; then its
caller is told, the run is ended, and those who shared it run again without it. A run that nobody waits for is ended too, and one that lasts
for `max_run_ms`: if it was for one part that is told so, else its parts run again one by one. An instance that doesn't end its run within
`STUCK_MS` of being told is lost; with the last one the engine is dead. Idle instances take turns, so that one which fails fast doesn't get
every batch. An error isn't tried on another instance: a model that fails on a request mostly does so everywhere.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import structlog

from decisions.batching import Limits, Queue, Waiting
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from workers.engines.arrays import Array
from workers.engines.instances import Attempt, Batch, Instance, Member, Outcome, Told, now_ms
from workers.engines.onnx_session import Session
from workers.engines.port import EngineDead, EngineError, EngineStats
from workers.processors.port import Part, Processor

log = structlog.get_logger("onnx")

GRACE_MS = 1_000
STUCK_MS = 10_000
SOON_MS = 1
"""Between looks at a batch whose next run is about to begin."""
JOIN_S = 5.0
APART_MAX = 1_024
"""So many signatures are remembered whose rows can't be told apart; one that is forgotten is found out again."""


@dataclass(slots=True, eq=False)
class Call:
    """A request's parts on their way. `done` resolves when all have run, or with the first error."""

    done: asyncio.Future[None]
    arrived_ms: float
    results: list[Sequence[Array]]
    left: int
    numbers: list[int] = field(default_factory=list)
    members: list[tuple[Member, Batch]] = field(default_factory=list)
    begun_ms: float | None = None
    model_ms: float = 0
    rows: int = 0


@dataclass(slots=True, eq=False)
class _Place:
    """Which part of which call a number in the queue is."""

    call: Call
    index: int
    part: Part


class Batcher:
    """See the module."""

    def __init__(self, limits: Limits, sessions: Sequence[Session], processor: Processor, max_run_ms: float) -> None:
        """An instance for each session. A run that lasts for `max_run_ms` is ended."""
        self._loop = asyncio.get_running_loop()
        self._max = limits.max_batch_size
        self._max_run_ms = max_run_ms
        self._queue = Queue(limits)
        self._places: dict[int, _Place] = {}
        self._running: dict[Member, _Place] = {}
        self._number = 0
        self._apart: OrderedDict[Hashable, None] = OrderedDict()
        self._pump_called = False
        self._timer: asyncio.TimerHandle | None = None
        self._end: HeadraceError | None = None
        self._lost: set[Instance] = set()
        self._watches: dict[Instance, asyncio.TimerHandle] = {}
        self._instances = [Instance(session, processor, self._tell) for session in sessions]
        self._idle = deque(self._instances)

    @property
    def stats(self) -> EngineStats:
        """Parts that run and that wait. Raises EngineDead."""
        if isinstance(self._end, EngineDead):
            raise self._end
        return EngineStats(running=len(self._running), waiting=len(self._queue))

    async def run(self, parts: Sequence[Part], deadline_ms: float, priority: int) -> Call:
        """Runs all parts, in batches with others; the call's `results` stand in their order. `deadline_ms` is by `now_ms`.

        Raises HeadraceError: the first part's that failed, `deadline_exceeded`, or EngineDead. Cancelling takes all parts back.
        """
        if self._end is not None:
            raise self._end
        now = now_ms()
        call = Call(self._loop.create_future(), now, [()] * len(parts), len(parts))
        for index, part in enumerate(parts):
            self._number += 1
            call.numbers.append(self._number)
            self._places[self._number] = _Place(call, index, part)
            together = part.signature is not None and part.signature not in self._apart
            signature = part.signature if together else (self._number,)
            rows = part.rows if together else self._max  # a batch by itself, which waits for nobody
            self._queue.add(Waiting(self._number, signature, rows, now, deadline_ms, priority))
        if not self._pump_called:
            self._pump_called = True
            self._loop.call_soon(self._pump)
        try:
            await call.done
        finally:
            self._drop(call)
        return call

    async def close(self, reason: HeadraceError) -> bool:
        """Fails what waits and runs, and ends the threads; whether all have ended. Calls that come later fail with the reason."""
        self._fail_all(reason)
        for instance in self._instances:
            instance.leave()
        return all(await asyncio.gather(*(asyncio.to_thread(each.join, JOIN_S) for each in self._instances)))

    # --- the loop's turns -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Does what is due now, and sees to it that the next is done in time."""
        self._pump_called = False
        now = now_ms()
        for waiting in self._queue.expired(now):
            _fail(self._places.pop(waiting.number).call, _late("before the model came to it"))
        while self._idle and (batch := self._queue.next_batch(now)):
            self._begin(self._idle.popleft(), batch, now)
        due = [self._queue.first_deadline_ms(), self._queue.wake_ms() if self._idle else None]
        at_ms = min((each for each in due if each is not None), default=None)
        if at_ms is not None:
            self._wake_at(now, at_ms)

    def _wake_at(self, now: float, at_ms: float) -> None:
        """One timer; one that is set to an earlier time finds nothing to do, and sets the next."""
        when = self._loop.time() + max(0.0, at_ms - now) / 1000
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        """The timer's turn, which may come a little early: then nothing is due, and there must be another."""
        self._timer = None
        self._pump()

    def _begin(self, instance: Instance, chosen: Sequence[Waiting], now: float) -> None:
        members = []
        for waiting in chosen:
            place = self._places.pop(waiting.number)
            member = Member(place.part, waiting.deadline_ms)
            members.append(member)
            self._running[member] = place
            if place.call.begun_ms is None:
                place.call.begun_ms = now
        batch = Batch(members)
        for member in members:
            self._running[member].call.members.append((member, batch))
        instance.give(batch)
        self._watch(instance, batch)

    def _tell(self, instance: Instance, batch: Batch, told: Told) -> None:
        """In the instance's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, instance, batch, told)
        except RuntimeError:  # the loop has closed
            pass

    def _take(self, instance: Instance, batch: Batch, told: Told) -> None:
        """Callers get their rows, or their error; after the last of a batch the instance is idle."""
        rows = told.rows if batch.members[0].part.signature is not None else 0
        for member, outcome in told.outcomes.items():
            place = self._running.pop(member, None)
            if place is not None and not place.call.done.done():
                _settle(place, outcome, told.model_ms, rows)
        if told.last:
            self._finish(instance, batch)
            self._pump()

    def _finish(self, instance: Instance, batch: Batch) -> None:
        """The instance is idle, and who had left the batch runs no more."""
        batch.ended = True
        instance.batch = None
        if (watch := self._watches.pop(instance, None)) is not None:
            watch.cancel()
        self._lost.discard(instance)
        self._idle.append(instance)
        if batch.unequal:
            self._part(batch.members[0].part.signature)
        for member in batch.members:
            if (place := self._running.pop(member, None)) is not None:
                _fail(place.call, EngineError("the run was ended"))

    def _part(self, signature: Hashable) -> None:
        """Requests of this signature run by themselves from now on: callers choose shapes, and those of others are as they were."""
        if signature not in self._apart:
            log.warning("the model's outputs don't have a row for each row given: such requests run by themselves")
        self._apart[signature] = None
        self._apart.move_to_end(signature)
        if len(self._apart) > APART_MAX:
            self._apart.popitem(last=False)

    # --- ends before the end ----------------------------------------------------------------------------------------

    def _watch(self, instance: Instance, batch: Batch) -> None:
        """Wakes when the first deadline of a batch is past by the grace, or a run of it may be too long."""
        ends_ms = [member.deadline_ms + GRACE_MS for member in self._awaited(batch)]
        at_ms = min([batch.limit_ms(self._max_run_ms), *ends_ms])
        delay_s = max(SOON_MS, at_ms - now_ms()) / 1000
        self._watches[instance] = self._loop.call_later(delay_s, self._overdue, instance, batch)

    def _awaited(self, batch: Batch) -> list[Member]:
        """Those for whose outcome somebody waits."""
        return [member for member in batch.members if member in self._running and not member.gone]

    def _overdue(self, instance: Instance, batch: Batch) -> None:
        if batch.ended:
            return
        now = now_ms()
        for member in self._awaited(batch):
            if member.deadline_ms + GRACE_MS <= now:
                self._give_up(member, _late("while the model ran"))
                self._await_end(instance, batch, batch.stop_for(member))
        attempt = batch.stop_long(self._max_run_ms)
        if attempt is not None and len(attempt.members) == 1:
            self._give_up(attempt.members[0], _too_long(self._max_run_ms))
        self._await_end(instance, batch, attempt)
        self._watch(instance, batch)

    def _give_up(self, member: Member, error: HeadraceError) -> None:
        """Its caller is told; it runs no more."""
        member.gone = True
        _fail(self._running[member].call, error)

    def _await_end(self, instance: Instance, batch: Batch, attempt: Attempt | None) -> None:
        """A run that was told to end, if any, must do so in time."""
        if attempt is not None:
            self._loop.call_later(STUCK_MS / 1000, self._stuck, instance, batch, attempt)

    def _stuck(self, instance: Instance, batch: Batch, attempt: Attempt) -> None:
        """A run that was told to end should have."""
        if not batch.runs(attempt) or self._end is not None:
            return
        if attempt.long:  # nobody of the batch runs again
            for member in self._awaited(batch):
                self._give_up(member, _too_long(self._max_run_ms))
        if self._awaited(batch):  # they run again, or wait in vain until their own deadlines
            self._await_end(instance, batch, attempt)
            return
        self._lost.add(instance)
        log.error("an instance doesn't end its run", lost=len(self._lost), instances=len(self._instances))
        if len(self._lost) == len(self._instances):
            self._fail_all(EngineDead("every instance of the model hangs in a run that doesn't end"))

    def _drop(self, call: Call) -> None:
        """Takes back what is left of a call, whatever its end was."""
        if call.done.done() and not call.done.cancelled():
            call.done.exception()  # whoever left before it was told needs no word of it
        for waiting in self._queue.remove_all(call.numbers):
            del self._places[waiting.number]
        for member, batch in call.members:
            if not batch.ended:
                member.gone = True
                instance = next((each for each in self._instances if each.batch is batch), None)
                if instance is not None:
                    self._await_end(instance, batch, batch.stop_for())

    def _fail_all(self, reason: HeadraceError) -> None:
        self._end = self._end or reason
        for timer in (self._timer, *self._watches.values()):
            if timer is not None:
                timer.cancel()
        calls = [place.call for place in (*self._places.values(), *self._running.values())]
        for call in calls:
            _fail(call, reason)
        for instance in self._instances:
            if instance.batch is not None:
                for member in instance.batch.members:
                    member.gone = True
                instance.batch.stop_for()


def _late(when: str) -> HeadraceError:
    return HeadraceError(Reason.DEADLINE_EXCEEDED, f"the request's deadline passed {when}")


def _too_long(max_run_ms: float) -> HeadraceError:
    text = f"a run of the model took longer than it may, {max_run_ms:g} ms (`max_run_ms` of engine_args)"
    return HeadraceError(Reason.TIME_LIMIT_EXCEEDED, text)


def _fail(call: Call, error: HeadraceError) -> None:
    if not call.done.done():
        call.done.set_exception(error)


def _settle(place: _Place, outcome: Outcome, model_ms: float, rows: int) -> None:
    call = place.call
    if isinstance(outcome, HeadraceError):
        _fail(call, outcome)
        return
    call.results[place.index] = outcome
    call.model_ms = max(call.model_ms, model_ms)
    call.rows = max(call.rows, rows)
    call.left -= 1
    if not call.left:
        call.done.set_result(None)
