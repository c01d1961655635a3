"""Every interleaving of owners, zombies, delayed sends, crashes, a duplicate work record, a timer and a cancel, for one request.

What readers accept is decided by the project's own `decisions.stream.fold`, and what a new owner does by `decisions.takeover`, so the code
that is checked is the code that runs. `explore` counts the states, or raises `Violation` with the way there. A broken rule is given as a
variant of the fold, of the decision, or of what workers do.

A worker is (phase, attempt, prefix its next token depends on, sends not yet appended, record, what it decided at its own marker), or IDLE. A
token is the number of the attempt that made it, so a torn answer shows as a token whose maker knew another prefix.

States that differ only in the names of attempts, workers or records count as one: nothing depends on a name, but for the order of attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any
from unittest import mock

from decisions import takeover
from decisions.stream import NEW, Input, StreamState, fold
from decisions.takeover import Plan, Reading, decide
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    Sampling,
    Timings,
    TokensGenerated,
    Usage,
)

Fold = Callable[[StreamState, Input], tuple[StreamState, bool]]
Send = tuple[Any, ...]
Decided = tuple[()] | tuple[str, tuple[int, ...]]  # the action's name, the tokens to go on from; empty before
Worker = tuple[Any, ...]  # see above
State = tuple[Any, ...]
Ranks = tuple[int, ...]  # by attempt
IDLE: Worker = ()
NOBODY = -1
"""The owner of a record that has none."""
WHO = ("r", "t", "m", "1", "interactive")
GREEDY = Sampling(max_tokens=100, temperature=0.0)
NEVER = 1_000
"""More failures than there are reassignments."""


class Violation(AssertionError):
    """A rule is broken: what happened, and the states on the way."""


@dataclass(frozen=True, eq=False, slots=True)
class Reader:
    """What readers know: the fold's state, the accepted tokens, "torn" or "". `Explorer` makes each once, so that equal ones are identical."""

    stream: StreamState
    accepted: tuple[int, ...]
    torn: str


@dataclass(frozen=True)
class Rules:
    """What is explored. `fold` is what readers apply, `decide` what owners do; the flags break, one by one, what workers must do.

    Failures are counted, which makes more states, only if `failures_max` of them are within reach. With `releases`, which makes more
    states too, an owner may say that it might lose the request, and that it keeps it, be that true or not; it goes on all the while.
    """

    tokens: int = 2
    reassignments: int = 2
    workers: int = 2
    failures_max: int = NEVER
    fold: Fold = fold
    decide: Callable[[Reading, Attempt, Sampling, int], Plan] = decide
    read_before_marker: bool = False
    commit_any: bool = False
    releases: bool = False


def event_of(send: Send) -> Input:
    """The real event that a send of the model stands for."""
    match send:
        case ("marker", attempt):
            return GenerationTakenOver(*WHO, Attempt(0, attempt), "w")
        case ("release", attempt):
            return GenerationReleased("r", Attempt(0, attempt), "w")
        case ("start", attempt, count):
            return GenerationStarted(*WHO, Attempt(0, attempt), (count,), 1, "w")
        case ("token", attempt, first, _):
            return TokensGenerated("r", 0, Attempt(0, attempt), first, (attempt,), "")
        case ("end", attempt, total):
            return InferenceCompleted(
                *WHO, Attempt(0, attempt), (ChoiceEnd(0, total, "stop"),), Usage(1, total), Timings(), "w"
            )
        case ("fail", attempt, total):
            return InferenceFailed(*WHO, "poisoned", "", Attempt(0, attempt), (total,))
        case ("timer",):
            return InferenceFailed(*WHO, "deadline_exceeded", "", if_not_started=True)
        case _:
            return InferenceFailed(*WHO, "cancelled", "")


class Explorer:
    """Explores all states of one set of rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._counted = rules.failures_max < NEVER
        self.apply = lru_cache(maxsize=None)(self._applied)
        self.decide = lru_cache(maxsize=None)(self._decided)
        self._reader = lru_cache(maxsize=None)(Reader)
        self._renamed_reader = lru_cache(maxsize=None)(self._rename_reader)

    def _applied(self, reader: Reader, send: Send) -> Reader:
        """What a reader knows after the broker appended a send."""
        found = reading(reader.stream, reader.accepted)
        found.apply(event_of(send))
        known = tuple(found.ids[0]) if found.ids else ()
        tears = len(known) > len(reader.accepted) and send[3] != reader.accepted
        return self._reader(found.state, known, reader.torn or ("torn" if tears else ""))

    def _decided(self, reader: Reader, attempt: int) -> Decided:
        """What the owner with this attempt decides when it has read up to here."""
        read = reading(reader.stream, reader.accepted)
        plan = self.rules.decide(read, Attempt(0, attempt), GREEDY, self.rules.failures_max)
        return plan.action.name, plan.accepted[0] if plan.accepted else ()

    def start(self) -> State:
        """Nothing has happened; one record and its duplicate wait."""
        return (
            self._reader(NEW, (), ""),
            (NOBODY, NOBODY),
            (False, False),
            (IDLE,) * self.rules.workers,
            0,
            self.rules.reassignments,
            1,
            1,
            (True, True),
        )

    def steps(self, state: State) -> Iterator[State]:
        """Every state that one step leads to."""
        reader, owner, done, workers, following, left, timer, cancel, fresh = state
        if timer:
            yield (self.apply(reader, ("timer",)), owner, done, workers, following, left, 0, cancel, fresh)
        if cancel:
            yield (self.apply(reader, ("cancel",)), owner, done, workers, following, left, timer, 0, fresh)
        for i, worker in enumerate(workers):
            if worker:
                yield from self._work(state, i, worker)
            else:
                yield from self._assign(state, i)

    def _assign(self, state: State, i: int) -> Iterator[State]:
        """A record is given to an idle worker: fresh, or taken from a dead or living owner, who becomes a zombie."""
        reader, owner, done, workers, following, left, timer, cancel, fresh = state
        for record in (0, 1):
            cost = 0 if owner[record] == NOBODY else 1
            if done[record] or cost > left:
                continue
            first: Send = ("start", following, 0) if fresh[record] else ("marker", following)
            worker = ("run" if fresh[record] else "mark", following, (), (first,), record, ())
            yield (
                reader,
                put(owner, record, i),
                done,
                put(workers, i, worker),
                following + 1,
                left - cost,
                timer,
                cancel,
                put(fresh, record, False),
            )

    def _follow(self, worker: Worker, decided: Decided) -> Worker:
        """The worker that does what it decided."""
        _, attempt, _, pending, record, _ = worker
        action, accepted = decided  # type: ignore[misc]  # it has decided
        start: Send = ("start", attempt, len(accepted))
        match action:
            case "RUN":
                return "run", attempt, accepted, (*pending, start), record, ()
            case "POISONED":
                return "end", attempt, accepted, (*pending, start, ("fail", attempt, len(accepted))), record, ()
            case _:  # it has ended, or somebody newer owns it
                return "end", attempt, accepted, pending, record, ()

    def _work(self, state: State, i: int, worker: Worker) -> Iterator[State]:
        """What a busy worker may do next: crash, have a send appended, read, generate, end, commit."""
        reader, owner, done, workers, following, left, timer, cancel, fresh = state
        phase, attempt, prefix, pending, record, read = worker
        mine = owner[record] == i

        def now(reader: Reader, changed: Worker, owner: Any = owner, done: Any = done, left: int = left) -> State:
            return (reader, owner, done, put(workers, i, changed), following, left, timer, cancel, fresh)

        if left:
            yield now(reader, IDLE, put(owner, record, NOBODY) if mine else owner, left=left - 1)
        if pending:
            after = self.apply(reader, pending[0])
            seen = self.decide(after, attempt) if pending[0][0] == "marker" else read
            yield now(after, (phase, attempt, prefix, pending[1:], record, seen))
        if phase == "mark":
            if self.rules.read_before_marker and not read and pending:
                early = self.decide(self.apply(reader, pending[0]), attempt)
                yield now(reader, (phase, attempt, prefix, pending, record, early))
            if read and (not pending or self.rules.read_before_marker):
                yield now(reader, self._follow(worker, read))
        if phase == "run" and len(pending) < 2:
            if len(prefix) < self.rules.tokens:
                token: Send = ("token", attempt, len(prefix), prefix)
                yield now(reader, ("run", attempt, (*prefix, attempt), (*pending, token), record, ()))
            else:
                yield now(reader, ("end", attempt, prefix, (*pending, ("end", attempt, self.rules.tokens)), record, ()))
            if self.rules.releases and not pending:
                yield now(reader, ("run", attempt, prefix, (*pending, ("release", attempt)), record, ()))
                kept: Send = ("start", attempt, len(prefix))
                yield now(reader, ("run", attempt, prefix, (*pending, kept), record, ()))
        if phase == "end" and not pending:
            commits = mine or self.rules.commit_any
            yield now(
                reader,
                IDLE,
                put(owner, record, NOBODY) if mine else owner,
                put(done, record, True) if commits else done,
            )

    def canonical(self, state: State) -> State:
        """Of the states that differ from this one in names alone, always the same one: attempts are named by their rank."""
        reader, owner, done, workers, _, left, timer, cancel, fresh = state
        current = None if reader.stream.attempt is None else reader.stream.attempt.counter
        used = frozenset(reader.accepted).union(*map(attempts_of, workers), () if current is None else (current,))
        rank = ranks(used)
        reader = self._renamed_reader(reader, rank)
        workers = tuple(renamed_worker(worker, rank) for worker in workers)
        owners, done, fresh, workers = min(
            in_order(owner, done, fresh, workers), in_other_order(owner, done, fresh, workers)
        )
        return reader, owners, done, workers, len(used), left, timer, cancel, fresh

    def _rename_reader(self, reader: Reader, rank: Ranks) -> Reader:
        """What readers know, with its attempts renamed. Of failures only the count matters, and of an ending not its message."""
        stream = reader.stream
        stream = replace(
            stream,
            attempt=None if stream.attempt is None else Attempt(0, rank[stream.attempt.counter]),
            failures=stream.failures if self._counted else 0,
            closed=stream.closed and replace(stream.closed, message=""),
        )
        return self._reader(stream, renamed(reader.accepted, rank), reader.torn)


def reading(state: StreamState, accepted: tuple[int, ...]) -> Reading:
    """What a worker that takes over has read."""
    return Reading(state, [list(accepted)] if state.accepted else [])


def put(items: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one item replaced."""
    return (*items[:i], value, *items[i + 1 :])


@cache
def attempts_of(worker: Worker) -> frozenset[int]:
    """Every attempt that a worker knows of."""
    if not worker:
        return frozenset()
    _, attempt, prefix, pending, _, read = worker
    sends = [{send[1], *(send[3] if len(send) > 3 else ())} for send in pending]
    return frozenset({attempt, *prefix, *(read[1] if read else ())}.union(*sends))


@cache
def renamed_worker(worker: Worker, rank: Ranks) -> Worker:
    """The worker with its attempts renamed."""
    if not worker:
        return worker
    phase, attempt, prefix, pending, record, read = worker
    sends = tuple((s[0], rank[s[1]], *s[2:3], *([renamed(s[3], rank)] if len(s) > 3 else [])) for s in pending)
    return phase, rank[attempt], renamed(prefix, rank), sends, record, read and (read[0], renamed(read[1], rank))


def renamed(attempts: tuple[int, ...], rank: Ranks) -> tuple[int, ...]:
    """The attempts renamed."""
    return tuple(rank[attempt] for attempt in attempts)


@cache
def ranks(attempts: frozenset[int]) -> Ranks:
    """The rank of each attempt."""
    found = [0] * (max(attempts, default=-1) + 1)
    for rank, attempt in enumerate(sorted(attempts)):
        found[attempt] = rank
    return tuple(found)


@cache
def of_other_record(worker: Worker) -> Worker:
    """The worker with the records' names swapped."""
    return worker and put(worker, 4, 1 - worker[4])


def in_order(owner: Any, done: Any, fresh: Any, workers: tuple[Worker, ...]) -> tuple[Any, ...]:
    """The same with the workers sorted."""
    if all(one <= next_one for one, next_one in pairwise(workers)):
        return owner, done, fresh, workers
    places = sorted(range(len(workers)), key=workers.__getitem__)
    place = {old: new for new, old in enumerate(places)}
    return tuple(place.get(i, NOBODY) for i in owner), done, fresh, tuple(workers[i] for i in places)


def in_other_order(owner: Any, done: Any, fresh: Any, workers: tuple[Worker, ...]) -> tuple[Any, ...]:
    """The same with the records' names swapped, and then the workers sorted."""
    return in_order(owner[::-1], done[::-1], fresh[::-1], tuple(map(of_other_record, workers)))


def explore(rules: Rules) -> int:
    """The number of states; raises `Violation` if an answer is torn or miscounted, a request lost, or a state can't end."""
    with mock.patch.object(takeover, "fold", rules.fold):
        return _explore(Explorer(rules))


def _explore(explorer: Explorer) -> int:
    states = [explorer.canonical(explorer.start())]
    numbers = {states[0]: 0}
    came = [0]
    before: list[list[int]] = [[]]
    closed: list[int] = []
    for number, state in enumerate(states):  # it grows
        if state[0].stream.closed:
            closed.append(number)
            continue
        for step in explorer.steps(state):
            following = explorer.canonical(step)
            if (found := numbers.setdefault(following, len(states))) == len(states):
                states.append(following)
                came.append(number)
                before.append([])
                if fault := fault_of(following):
                    raise Violation(f"{fault}: {way(states, came, found)}")
            before[found].append(number)
    endable, left = set(closed), closed
    while left:
        for earlier in before[left.pop()]:
            if earlier not in endable:
                endable.add(earlier)
                left.append(earlier)
    if stuck := [number for number in range(len(states)) if number not in endable]:
        raise Violation(f"stuck: {way(states, came, stuck[0])}")
    return len(states)


def fault_of(state: State) -> str:
    """What is wrong with a state, or ""."""
    reader: Reader = state[0]
    _, _, done, workers, *_ = state
    closed = reader.stream.closed
    if reader.torn:
        return reader.torn
    if closed and closed.reason == "inconsistent_stream":
        return "miscounted"
    return "lost: all is committed, and there is no ending" if not closed and all(done) and not any(workers) else ""


def way(states: list[State], came: list[int], number: int) -> str:
    """The states that led here, one a line."""
    steps = [states[number]]
    while number:
        number = came[number]
        steps.append(states[number])
    return "\n" + "\n".join(f"  {state[0]} {state[3]}" for state in reversed(steps))
