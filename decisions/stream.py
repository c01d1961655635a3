"""The token stream is a fold: one pure function over a request's events, in the order of their partition.

Every reader (bridge, endings, a worker taking over) applies it, so all agree on which tokens count and how the request
ended, whatever former owners still write. An attempt is ordered: (generation of the owner's consumer group, counter).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from schemas.events import (
    Attempt,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    TokensGenerated,
)
from schemas.reasons import Reason

COMPLETED, FAILED, REJECTED = "completed", "failed", "rejected"


@dataclass(frozen=True, slots=True)
class Closed:
    """How a stream ended: `outcome` is completed, failed or rejected; the last two have a reason."""

    outcome: str
    reason: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What is known of one request's answer.

    Attributes:
        attempt: the current attempt, or None before the first.
        started: whether the current attempt has started generating.
        accepted: for each choice, how many tokens count so far; empty until the first start.
        closed: how it ended, or None while it is open.
        failures: attempts that started and were taken over without having ended or been released: each may be the request's own fault.
        tenant: whose request it is, from the first attempt's event; "" before it. Another tenant's cancel doesn't count.
        released: whether the owner expects another to take over: it goes on until then, and that won't count as a failure.
    """

    attempt: Attempt | None = None
    started: bool = False
    accepted: tuple[int, ...] = ()
    closed: Closed | None = None
    failures: int = 0
    tenant: str = ""
    released: bool = False

    @property
    def untouched(self) -> bool:
        """Neither started, or released since, nor with any token: what may still be ended for not having begun in time."""
        return (not self.started or self.released) and not any(self.accepted)


NEW = StreamState()
Input = (
    GenerationStarted
    | TokensGenerated
    | GenerationTakenOver
    | GenerationReleased
    | InferenceCompleted
    | InferenceFailed
    | InferenceRejected
)


def fold(state: StreamState, event: Input) -> tuple[StreamState, bool]:
    """The state after an event, and whether the event counted. What doesn't count changes nothing and is shown to nobody."""
    if state.closed is not None:
        return state, False
    match event:
        case TokensGenerated():
            return _tokens(state, event)
        case GenerationStarted():
            return _started(state, event)
        case GenerationTakenOver():
            return _taken_over(state, event)
        case GenerationReleased():
            return _released(state, event)
        case InferenceCompleted():
            return _completed(state, event)
        case InferenceFailed():
            return _failed(state, event)
        case InferenceRejected():
            return _rejected(state, event)


def _started(state: StreamState, event: GenerationStarted) -> tuple[StreamState, bool]:
    """With no current attempt it becomes current; the current attempt starts, or keeps what it released; any other is ignored."""
    running = state.started and not state.released
    if state.attempt is not None and (state.attempt != event.attempt or running):
        return state, False
    accepted = state.accepted or (0,) * len(event.from_tokens)
    if len(event.from_tokens) != len(accepted):
        return state, False
    return replace(
        state,
        attempt=event.attempt,
        started=True,
        released=False,
        accepted=accepted,
        tenant=state.tenant or event.tenant,
    ), True


def _taken_over(state: StreamState, event: GenerationTakenOver) -> tuple[StreamState, bool]:
    """Becomes current, with nothing started, if its attempt is higher than the current one: a former owner's marker is late."""
    if state.attempt is not None and event.attempt <= state.attempt:
        return state, False
    failures = state.failures + (state.started and not state.released)
    return replace(
        state,
        attempt=event.attempt,
        started=False,
        released=False,
        failures=failures,
        tenant=state.tenant or event.tenant,
    ), True


def _released(state: StreamState, event: GenerationReleased) -> tuple[StreamState, bool]:
    """The current owner may lose the request: its attempt won't count as a failure when the next one takes over. Until then it goes on."""
    if event.attempt != state.attempt or not state.started or state.released:
        return state, False
    return replace(state, released=True), True


def _tokens(state: StreamState, event: TokensGenerated) -> tuple[StreamState, bool]:
    """Accepted if the attempt is current and started, and they follow the tokens accepted so far."""
    if not state.started or event.attempt != state.attempt or not 0 <= event.choice < len(state.accepted):
        return state, False
    if event.first != state.accepted[event.choice]:
        return state, False
    counts = list(state.accepted)
    counts[event.choice] += len(event.token_ids)
    return replace(state, accepted=tuple(counts)), True


def _completed(state: StreamState, event: InferenceCompleted) -> tuple[StreamState, bool]:
    """Closes if the attempt is current and started. A total that isn't its choice's accepted count closes it as failed."""
    if not state.started or event.attempt != state.attempt:
        return state, False
    ends = sorted((end.choice, end.total) for end in event.choices)
    if ends != list(enumerate(state.accepted)):
        return replace(state, closed=_inconsistent(tuple(total for _, total in ends), state.accepted)), True
    return replace(state, closed=Closed(COMPLETED)), True


def _failed(state: StreamState, event: InferenceFailed) -> tuple[StreamState, bool]:
    """An attempt's failure closes if it is current and started; one that is `if_not_started`, what is untouched; a cancel always."""
    if event.attempt is not None:
        if not state.started or event.attempt != state.attempt:
            return state, False
        if event.totals and event.totals != state.accepted:
            return replace(state, closed=_inconsistent(event.totals, state.accepted)), True
    elif (event.if_not_started and not state.untouched) or (state.tenant and event.tenant != state.tenant):
        return state, False
    return replace(state, closed=Closed(FAILED, event.reason, event.message)), True


def _rejected(state: StreamState, event: InferenceRejected) -> tuple[StreamState, bool]:
    """Closes what no worker has taken up. What one has was let in, and goes on, whatever another admission says of it."""
    if state.attempt is not None:
        return state, False
    return replace(state, closed=Closed(REJECTED, event.reason, event.message)), True


def _inconsistent(totals: tuple[int, ...], accepted: tuple[int, ...]) -> Closed:
    told, counted = ", ".join(map(str, totals)), ", ".join(map(str, accepted))
    return Closed(
        FAILED,
        Reason.INCONSISTENT_STREAM.value,
        f"the worker made {told} tokens a choice, and {counted} are in the stream",
    )
