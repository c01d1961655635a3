"""What a folded stream becomes: the record of its first start, its ending, and the whole answer.

`Gathered` is what endings keeps of an open request beside the fold's own state: the events that counted. The functions
turn it into events and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decisions.stream import COMPLETED, Closed, StreamState
from schemas.events import (
    ChoiceAnswer,
    ChoiceEnd,
    GenerationStarted,
    GenerationTakenOver,
    InferenceAnswered,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceStarted,
    Position,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.payloads import OBJECT_MAX_BYTES
from schemas.reasons import Reason

CONTENT_BYTES_MAX = OBJECT_MAX_BYTES - 64 * 1024
"""The largest answer that is kept, by the upper bound of `content_bytes`: what the object store takes. What is told whole has `ANSWER_MAX_BYTES`, and
the ids of its tokens come to that."""
ADMISSION = "admission"
"""The source of the ending of what its caller was told to be refused."""
FAILED_CHOICE = "error"
"""The finish reason of a choice that didn't become whole."""
TOKEN_ID_BYTES = 5
LOGPROB_BYTES = 24

Ending = InferenceCompleted | InferenceFailed


@dataclass(frozen=True, slots=True)
class Facts:
    """Whose request it is and what serves it, as its first event tells; the prompt's length from its first start, and its name in the cache."""

    tenant: str = ""
    model: str = ""
    version: str = ""
    tier: str = ""
    prompt_tokens: int = 0
    cache_key: str = ""


def facts(known: Facts, event: object) -> Facts:
    """What is known after one more event."""
    match event:
        case GenerationStarted() | GenerationTakenOver():
            found = Facts(event.tenant, event.model, event.version, event.tier, known.prompt_tokens)
            if not isinstance(event, GenerationStarted):
                return found if not known.tenant else known
            return replace(
                found if not known.tenant else known, prompt_tokens=event.prompt_tokens, cache_key=event.cache_key
            )
        case InferenceCompleted() | InferenceFailed() if not known.model:
            return replace(known, tenant=event.tenant, model=event.model, version=event.version, tier=event.tier)
        case InferenceRejected() if not known.model:
            return replace(known, tenant=event.tenant, model=event.model, tier=event.tier)
        case _:
            return known


def content_bytes(event: TokensGenerated) -> int:
    """An upper bound of what an event adds to the answer's record."""
    size = len(event.text.encode()) + TOKEN_ID_BYTES * len(event.token_ids)
    for chosen in event.logprobs or ():
        size += LOGPROB_BYTES + len(chosen.text) + sum(LOGPROB_BYTES + len(other.text) for other in chosen.top)
    return size


def started(event: GenerationStarted, position: Position) -> InferenceStarted:
    """The record of a request's first start."""
    return InferenceStarted(
        request_id=event.request_id,
        tenant=event.tenant,
        model=event.model,
        version=event.version,
        tier=event.tier,
        attempt=event.attempt,
        worker_id=event.worker_id,
        queue_ms=event.queue_ms,
        position=position,
    )


def ending(state: StreamState, known: Facts, event: Ending) -> Ending:
    """The ending as folded, from the event that closed the stream: totals and usage are what the caller got."""
    closed = _closed(state)
    cached = event.usage.cached_tokens if event.usage is not None else 0
    usage = Usage(known.prompt_tokens, sum(state.accepted), cached)
    if isinstance(event, InferenceCompleted) and closed.outcome == COMPLETED:
        return replace(event, usage=usage, outputs=())
    return InferenceFailed(
        request_id=event.request_id,
        tenant=known.tenant,
        model=known.model,
        version=known.version,
        tier=known.tier,
        reason=closed.reason or Reason.INTERNAL_ERROR.value,
        message=closed.message,
        attempt=event.attempt,
        totals=state.accepted,
        if_not_started=isinstance(event, InferenceFailed) and event.if_not_started,
        usage=usage,
        source=event.source if isinstance(event, InferenceFailed) else "worker",
    )


def refused(event: GenerationStarted | GenerationTakenOver | InferenceFailed, reason: str) -> InferenceFailed:
    """The ending of a request that one admission let in and another refused: the refusal was told first, so nothing was delivered."""
    return InferenceFailed(
        request_id=event.request_id,
        tenant=event.tenant,
        model=event.model,
        version=event.version,
        tier=event.tier,
        reason=reason,
        message="The request was refused before it began.",
        usage=Usage(0, 0),
        source=ADMISSION,
    )


def answered(
    state: StreamState, known: Facts, event: Ending | InferenceRejected, counted: Sequence[TokensGenerated] | None
) -> InferenceAnswered:
    """The whole result; `counted` are the token events that counted, or None if they were too large to keep."""
    closed = _closed(state)
    cached = event.usage.cached_tokens if not isinstance(event, InferenceRejected) and event.usage is not None else 0
    whole = closed.outcome == COMPLETED
    ends = event.choices if whole and isinstance(event, InferenceCompleted) else ()
    outputs = event.outputs if whole and isinstance(event, InferenceCompleted) else ()
    reason, message = (None, None) if whole else (closed.reason, closed.message)
    if counted is None and whole:
        reason, message = Reason.ANSWER_TOO_LARGE.value, Reason.ANSWER_TOO_LARGE.text
    return InferenceAnswered(
        request_id=event.request_id,
        tenant=known.tenant,
        model=known.model,
        version=known.version,
        tier=known.tier,
        choices=_choices(len(state.accepted), ends, counted),
        usage=Usage(known.prompt_tokens, sum(state.accepted), cached),
        error_reason=reason,
        error_message=message,
        cache_key=known.cache_key if reason is None else "",
        outputs=outputs,
        retry_after_ms=event.retry_after_ms if isinstance(event, InferenceRejected) else None,
    )


def _closed(state: StreamState) -> Closed:
    if state.closed is None:
        raise LookupError("the stream is still open")
    return state.closed


def _choices(
    count: int, ends: Sequence[ChoiceEnd], counted: Sequence[TokensGenerated] | None
) -> tuple[ChoiceAnswer, ...]:
    by_choice = {end.choice: end for end in ends}
    chunks: dict[int, list[TokensGenerated]] = {choice: [] for choice in range(count)}
    for event in counted or ():
        chunks[event.choice].append(event)
    return tuple(_choice(choice, chunks[choice], by_choice.get(choice), counted is None) for choice in range(count))


def _choice(choice: int, chunks: Sequence[TokensGenerated], end: ChoiceEnd | None, dropped: bool) -> ChoiceAnswer:
    tail = end.text if end is not None and not dropped else ""
    return ChoiceAnswer(
        choice=choice,
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        text="".join(chunk.text for chunk in chunks) + tail,
        finish_reason=end.finish_reason if end is not None else FAILED_CHOICE,
        stop_reason=end.stop_reason if end is not None else None,
        logprobs=_logprobs(chunks),
    )


def _logprobs(chunks: Sequence[TokensGenerated]) -> tuple[TokenLogprob, ...] | None:
    if all(chunk.logprobs is None for chunk in chunks):
        return None
    return tuple(logprob for chunk in chunks for logprob in chunk.logprobs or ())
