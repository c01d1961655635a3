"""What the next owner of a request does with it, once it has fenced it and read its stream.

The order is: write `GenerationTakenOver`, wait for the broker to confirm it, read the stream up to that marker, then decide here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from decisions.stream import NEW, Input, StreamState, fold
from schemas.events import Attempt, Sampling, TokensGenerated

FAILURES_MAX = 3
"""After this many attempts that started and neither ended nor were released, a request is poisoned."""


class Action(Enum):
    """What to do with a request."""

    SKIP = "it has ended: nothing is left to do"
    LEAVE = "somebody newer owns it: say nothing more about it"
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
    """What to do, why, and for each choice the tokens to go on from (empty if none were accepted)."""

    action: Action
    accepted: tuple[tuple[int, ...], ...] = ()
    detail: str = ""

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
        return Plan(Action.POISONED, accepted, f"{state.failures} attempts at it ended with their worker")
    if (why := inexact(sampling, tuple(map(len, accepted)))) is not None:
        return Plan(Action.LOST, accepted, why)
    return Plan(Action.RUN, accepted)


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
