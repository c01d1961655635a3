"""What the next owner of a request does with it, once it has fenced it and read its stream.

The order is: write `GenerationTakenOver`, wait for the broker to confirm it, read the stream up to that marker, then decide here.

An attempt that started and neither ended nor was released has failed: its worker died, and any request that ran there may be why. The
worst that a bad request can do is bounded by what `decide` says of the others that died with it:

- One failure proves little: most workers that die are killed, or run out of memory, and hundreds of answers are in mid-sentence. They
  go on at once, beside others, so that a death costs their callers a pause.
- A request that one more failure would end (`SUSPECT`) runs alone (`decisions/window.py`). So nothing but itself can end it: the bad
  one fails there and is `POISONED`, and those who died with it end well, one after the other, which clears them.

What that costs, and what was rejected: `docs/adr/0011-suspects-run-alone.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from decisions.stream import NEW, Input, StreamState, fold
from decisions.window import Standing
from schemas.events import Attempt, Sampling, TokensGenerated

FAILURES_MAX = 3
"""After this many attempts that started and neither ended nor were released, a request is poisoned."""


class Action(Enum):
    """What to do with a request."""

    SKIP = "it has ended: nothing is left to do"
    LEAVE = "somebody newer owns it, by this record or its duplicate: say nothing more about it"
    RUN = "go on from the accepted tokens, which may be none"
    LOST = "it can't be continued exactly: end it as worker_lost"
    POISONED = "it stopped too many workers: end it as poisoned"


@dataclass(slots=True)
class Reading:
    """The fold of one request's stream that also keeps the accepted tokens. `ids` has a list a choice, empty before the first start."""

    state: StreamState = NEW
    ids: list[list[int]] = field(default_factory=list)

    def apply(self, event: Input) -> None:
        """Folds one more event of the request, in the order of its partition."""
        self.state, counted = fold(self.state, event)
        if not counted:
            return
        while len(self.ids) < len(self.state.accepted):
            self.ids.append([])
        if isinstance(event, TokensGenerated):
            self.ids[event.choice].extend(event.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, why, for each choice the tokens to go on from (empty if none were accepted), and beside what it may run."""

    action: Action
    accepted: tuple[tuple[int, ...], ...] = ()
    detail: str = ""
    standing: Standing = Standing.FRESH

    @property
    def totals(self) -> tuple[int, ...]:
        """For each choice, how many tokens are accepted."""
        return tuple(map(len, self.accepted))


def decide(reading: Reading, attempt: Attempt, sampling: Sampling, failures_max: int = FAILURES_MAX) -> Plan:
    """The plan of the owner whose marker bears `attempt`. `reading` must have been folded up to that marker."""
    state = reading.state
    if state.closed is not None:
        return Plan(Action.SKIP, detail=state.closed.outcome)
    if state.attempt != attempt:
        return Plan(Action.LEAVE)
    accepted = tuple(map(tuple, reading.ids)) or ((),) * sampling.n
    if state.failures >= failures_max:
        detail = f"{state.failures} attempts at it ended with their worker"
        return Plan(Action.POISONED, accepted, detail, Standing.BEGUN)
    if (why := inexact(sampling, tuple(map(len, accepted)))) is not None:
        return Plan(Action.LOST, accepted, why, Standing.BEGUN)
    return Plan(Action.RUN, accepted, standing=standing(state, failures_max))


def standing(state: StreamState, failures_max: int = FAILURES_MAX) -> Standing:
    """How an open request stands when it is to run again. Without a failure none is a suspect, however few `failures_max` allows."""
    if state.failures >= max(1, failures_max - 1):
        return Standing.SUSPECT
    return Standing.BEGUN if state.failures or any(state.accepted) else Standing.FRESH


def inexact(sampling: Sampling, accepted: tuple[int, ...]) -> str | None:
    """Why an answer with these accepted tokens can't be continued exactly from its prompt and them, or None if it can.

    An engine takes the accepted tokens as part of the prompt, so what it counts over generated tokens starts anew: penalties, and the
    random sequence of a seed. (The minimum and maximum length are simply reduced.) An answer without tokens is begun again.
    """
    if not any(accepted):
        return None
    if sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0:
        return "its penalties count over the tokens generated so far"
    if sampling.seed is not None and sampling.temperature > 0:
        return "its seed's random sequence can't be entered midway"
    return None
