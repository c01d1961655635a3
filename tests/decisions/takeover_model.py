"""Every interleaving of owners, zombies, delayed sends, crashes, a duplicate work record, a timer and a cancel, for one request.

What readers accept is decided by the project's own `decisions.stream.fold`, and what a new owner does by `decisions.takeover`, so the code
that is checked is the code that runs. `explore` counts the states, or raises `Violation` with the way there. A broken rule is given as a
variant of the fold, of the decision, or of what workers do.

A worker is (phase, attempt, prefix its next token depends on, sends not yet appended, record, what it decided at its own marker). A token
is the number of the attempt that made it, so a torn answer shows as a token whose maker knew another prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
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
Reader = tuple[StreamState, tuple[int, ...], str]  # the fold's state, the accepted tokens, "torn" or ""
Decided = tuple[str, tuple[int, ...]]  # the action's name, the tokens to go on from
Worker = tuple[str, int, tuple[int, ...], tuple[Send, ...], int, Decided | None]
State = tuple[Any, ...]
WHO = ("r", "t", "m", "1", "interactive")
GREEDY = Sampling(max_tokens=100, temperature=0.0)
NEVER = 1_000
"""More failures than there are reassignments."""


class Violation(AssertionError):
    """A rule is broken: what happened, and the states on the way."""


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
        self._read_on = lru_cache(maxsize=None)(read_on)
        self._decide = lru_cache(maxsize=None)(self._decided)

    def apply(self, reader: Reader, send: Send) -> Reader:
        """What a reader knows after the broker appended a send."""
        state, accepted, torn = reader
        after, known = self._read_on(state, accepted, send)
        if len(known) == len(accepted):
            return after, accepted, torn
        return after, known, torn or ("torn" if send[3] != accepted else "")

    def decide(self, reader: Reader, attempt: int) -> Decided:
        """What the owner with this attempt decides when it has read up to here."""
        found: Decided = self._decide(reader[0], reader[1], attempt)
        return found

    def _decided(self, state: StreamState, accepted: tuple[int, ...], attempt: int) -> Decided:
        plan = self.rules.decide(reading(state, accepted), Attempt(0, attempt), GREEDY, self.rules.failures_max)
        return plan.action.name, plan.accepted[0] if plan.accepted else ()

    def start(self) -> State:
        """Nothing has happened; one record and its duplicate wait."""
        return (
            (NEW, (), ""),
            (None, None),
            (False, False),
            (None,) * self.rules.workers,
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
            if worker is None:
                yield from self._assign(state, i)
            else:
                yield from self._work(state, i, worker)

    def _assign(self, state: State, i: int) -> Iterator[State]:
        """A record is given to an idle worker: fresh, or taken from a dead or living owner, who becomes a zombie."""
        reader, owner, done, workers, following, left, timer, cancel, fresh = state
        for record in (0, 1):
            cost = 0 if owner[record] is None else 1
            if done[record] or cost > left:
                continue
            first: Send = ("start", following, 0) if fresh[record] else ("marker", following)
            worker = ("run" if fresh[record] else "mark", following, (), (first,), record, None)
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
        action, accepted = decided
        start: Send = ("start", attempt, len(accepted))
        match action:
            case "RUN":
                return "run", attempt, accepted, (*pending, start), record, None
            case "POISONED":
                return "end", attempt, accepted, (*pending, start, ("fail", attempt, len(accepted))), record, None
            case _:  # it has ended, or somebody newer owns it
                return "end", attempt, accepted, pending, record, None

    def _work(self, state: State, i: int, worker: Worker) -> Iterator[State]:
        """What a busy worker may do next: crash, have a send appended, read, generate, end, commit."""
        reader, owner, done, workers, following, left, timer, cancel, fresh = state
        phase, attempt, prefix, pending, record, read = worker
        mine = owner[record] == i

        def now(
            reader: Reader, changed: Worker | None, owner: Any = owner, done: Any = done, left: int = left
        ) -> State:
            return (reader, owner, done, put(workers, i, changed), following, left, timer, cancel, fresh)

        if left:
            yield now(reader, None, put(owner, record, None) if mine else owner, left=left - 1)
        if pending:
            after = self.apply(reader, pending[0])
            seen = self.decide(after, attempt) if pending[0][0] == "marker" else read
            yield now(after, (phase, attempt, prefix, pending[1:], record, seen))
        if phase == "mark":
            if self.rules.read_before_marker and read is None and pending:
                early = self.decide(self.apply(reader, pending[0]), attempt)
                yield now(reader, (phase, attempt, prefix, pending, record, early))
            if read is not None and (not pending or self.rules.read_before_marker):
                yield now(reader, self._follow(worker, read))
        if phase == "run" and len(pending) < 2:
            if len(prefix) < self.rules.tokens:
                token: Send = ("token", attempt, len(prefix), prefix)
                yield now(reader, ("run", attempt, (*prefix, attempt), (*pending, token), record, None))
            else:
                yield now(
                    reader, ("end", attempt, prefix, (*pending, ("end", attempt, self.rules.tokens)), record, None)
                )
            if self.rules.releases and not pending:
                yield now(reader, ("run", attempt, prefix, (*pending, ("release", attempt)), record, None))
                kept: Send = ("start", attempt, len(prefix))
                yield now(reader, ("run", attempt, prefix, (*pending, kept), record, None))
        if phase == "end" and not pending:
            commits = mine or self.rules.commit_any
            yield now(
                reader, None, put(owner, record, None) if mine else owner, put(done, record, True) if commits else done
            )


def reading(state: StreamState, accepted: tuple[int, ...]) -> Reading:
    """What a worker that takes over has read."""
    return Reading(state, [list(accepted)] if state.accepted else [])


def read_on(state: StreamState, accepted: tuple[int, ...], send: Send) -> tuple[StreamState, tuple[int, ...]]:
    """The same with one more event."""
    found = reading(state, accepted)
    found.apply(event_of(send))
    return found.state, tuple(found.ids[0]) if found.ids else ()


def put(items: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one item replaced."""
    return (*items[:i], value, *items[i + 1 :])


def canonical(state: State, *, failures: bool) -> State:
    """The state with its attempts renamed by rank, since only their order matters; `failures` says whether their count does."""
    (stream, accepted, torn), owner, done, workers, _, *rest = state
    current = None if stream.attempt is None else stream.attempt.counter
    used = {current, *accepted}
    for worker in filter(None, workers):
        _, attempt, prefix, pending, _, read = worker
        used |= {attempt, *prefix, *(read[1] if read else ())}
        for send in pending:
            used |= {send[1], *(send[3] if len(send) > 3 else ())}
    rank = {attempt: k for k, attempt in enumerate(sorted(used - {None}))}

    def renamed(items: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank[item] for item in items)

    after: list[Any] = []
    for worker in workers:
        if worker is not None:
            phase, attempt, prefix, pending, record, read = worker
            sends = tuple((s[0], rank[s[1]], *s[2:3], *([renamed(s[3])] if len(s) > 3 else [])) for s in pending)
            renamed_worker = (
                phase,
                rank[attempt],
                renamed(prefix),
                sends,
                record,
                read and (read[0], renamed(read[1])),
            )
            after.append(renamed_worker)
        else:
            after.append(None)
    closed = stream.closed and replace(stream.closed, message="")
    stream = replace(
        stream,
        attempt=None if current is None else Attempt(0, rank[current]),
        failures=stream.failures if failures else 0,
        closed=closed,
    )
    return ((stream, renamed(accepted), torn), owner, done, tuple(after), len(rank), *rest)


def explore(rules: Rules) -> int:
    """The number of states; raises `Violation` if an answer is torn or miscounted, a request lost, or a state can't end."""
    with mock.patch.object(takeover, "fold", rules.fold):
        return _explore(Explorer(rules))


def _explore(explorer: Explorer) -> int:
    counted = explorer.rules.failures_max < NEVER
    start = canonical(explorer.start(), failures=counted)
    came: dict[State, State | None] = {start: None}
    before: dict[State, list[State]] = {}
    closed: set[State] = set()
    queue = deque([start])
    while queue:
        state = queue.popleft()
        stream, _, torn = state[0]
        if torn or (stream.closed and stream.closed.reason == "inconsistent_stream"):
            raise Violation(f"{torn or 'miscounted'}: {way(came, state)}")
        if stream.closed:
            closed.add(state)
            continue
        if all(state[2]) and not any(state[3]):
            raise Violation(f"lost: all is committed, and there is no ending: {way(came, state)}")
        for following in (canonical(step, failures=counted) for step in explorer.steps(state)):
            before.setdefault(following, []).append(state)
            if following not in came:
                came[following] = state
                queue.append(following)
    endable, queue = set(closed), deque(closed)
    while queue:
        for earlier in before.get(queue.popleft(), ()):
            if earlier not in endable:
                endable.add(earlier)
                queue.append(earlier)
    if stuck := [state for state in came if state not in endable]:
        raise Violation(f"stuck: {way(came, stuck[0])}")
    return len(came)


def way(came: dict[State, State | None], state: State | None) -> str:
    """The states that led here, one a line."""
    steps = []
    while state is not None:
        steps.append(f"  {state[0]} {state[3]}")
        state = came[state]
    return "\n" + "\n".join(steps[::-1])
