"""Every interleaving of owners, zombies, delayed sends, crashes, a duplicate work record, a timer and a cancel, for one request.

What readers accept is decided by the project's own `decisions.stream.fold`, so the code that is checked is the code that runs. `explore`
counts the states, or raises `Violation` with the way there. A broken rule is given as a variant of the fold or of what workers do.

A worker is (phase, attempt, prefix its next token depends on, sends not yet appended, record, what it read at its own marker). A token is
the number of the attempt that made it, so a torn answer shows as a token whose maker knew another prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from decisions.stream import NEW, Input, StreamState, fold
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    Timings,
    TokensGenerated,
    Usage,
)

Fold = Callable[[StreamState, Input], tuple[StreamState, bool]]
Send = tuple[Any, ...]
Reader = tuple[StreamState, tuple[int, ...], str]  # the fold's state, the accepted tokens, "torn" or ""
Worker = tuple[str, int, tuple[int, ...], tuple[Send, ...], int, tuple[tuple[int, ...], bool] | None]
State = tuple[Any, ...]
WHO = ("r", "t", "m", "1", "interactive")


class Violation(AssertionError):
    """A rule is broken: what happened, and the states on the way."""


@dataclass(frozen=True)
class Rules:
    """What is explored. `fold` is what readers apply; the flags break, one by one, what workers must do."""

    tokens: int = 2
    reassignments: int = 2
    workers: int = 2
    fold: Fold = fold
    read_before_marker: bool = False
    commit_any: bool = False


def event_of(send: Send) -> Input:
    """The real event that a send of the model stands for."""
    match send:
        case ("marker", attempt):
            return GenerationTakenOver(*WHO, Attempt(0, attempt), "w")
        case ("start", attempt, count):
            return GenerationStarted(*WHO, Attempt(0, attempt), (count,), 1, "w")
        case ("token", attempt, first, _):
            return TokensGenerated("r", 0, Attempt(0, attempt), first, (attempt,), "")
        case ("end", attempt, total):
            return InferenceCompleted(
                *WHO, Attempt(0, attempt), (ChoiceEnd(0, total, "stop"),), Usage(1, total), Timings(), "w"
            )
        case ("timer",):
            return InferenceFailed(*WHO, "deadline_exceeded", "", if_not_started=True)
        case _:
            return InferenceFailed(*WHO, "cancelled", "")


class Explorer:
    """Explores all states of one set of rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._fold = lru_cache(maxsize=None)(lambda state, send: rules.fold(state, event_of(send)))

    def apply(self, reader: Reader, send: Send) -> Reader:
        """What a reader knows after the broker appended a send."""
        state, accepted, torn = reader
        after, counted = self._fold(state, send)
        if send[0] != "token" or not counted:
            return after, accepted, torn
        return after, (*accepted, send[1]), torn or ("torn" if send[3] != accepted else "")

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
            seen = seen_by(after) if pending[0][0] == "marker" else read
            yield now(after, (phase, attempt, prefix, pending[1:], record, seen))
        if phase == "mark":
            if self.rules.read_before_marker and read is None and pending:
                yield now(reader, (phase, attempt, prefix, pending, record, seen_by(reader)))
            if read is not None and (not pending or self.rules.read_before_marker):
                accepted, closed = read
                start: Send = ("start", attempt, len(accepted))
                yield now(
                    reader,
                    ("end", attempt, accepted, pending, record, None)
                    if closed
                    else ("run", attempt, accepted, (*pending, start), record, None),
                )
        if phase == "run" and len(pending) < 2:
            if len(prefix) < self.rules.tokens:
                token: Send = ("token", attempt, len(prefix), prefix)
                yield now(reader, ("run", attempt, (*prefix, attempt), (*pending, token), record, None))
            else:
                yield now(
                    reader, ("end", attempt, prefix, (*pending, ("end", attempt, self.rules.tokens)), record, None)
                )
        if phase == "end" and not pending:
            commits = mine or self.rules.commit_any
            yield now(
                reader, None, put(owner, record, None) if mine else owner, put(done, record, True) if commits else done
            )


def seen_by(reader: Reader) -> tuple[tuple[int, ...], bool]:
    """What a worker that reads up to here knows: the accepted tokens, and whether the stream is closed."""
    return reader[1], reader[0].closed is not None


def put(items: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one item replaced."""
    return (*items[:i], value, *items[i + 1 :])


def canonical(state: State) -> State:
    """The state with its attempts renamed by rank: only their order matters; nor does the count of failures."""
    (stream, accepted, torn), owner, done, workers, _, *rest = state
    current = None if stream.attempt is None else stream.attempt.counter
    used = {current, *accepted}
    for worker in filter(None, workers):
        _, attempt, prefix, pending, _, read = worker
        used |= {attempt, *prefix, *(read[0] if read else ())}
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
                read and (renamed(read[0]), read[1]),
            )
            after.append(renamed_worker)
        else:
            after.append(None)
    closed = stream.closed and replace(stream.closed, message="")
    stream = replace(stream, attempt=None if current is None else Attempt(0, rank[current]), failures=0, closed=closed)
    return ((stream, renamed(accepted), torn), owner, done, tuple(after), len(rank), *rest)


def explore(rules: Rules) -> int:
    """The number of states; raises `Violation` if an answer is torn or miscounted, a request lost, or a state can't end."""
    explorer = Explorer(rules)
    start = canonical(explorer.start())
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
        for following in map(canonical, explorer.steps(state)):
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
