"""One request's records as a timeline: what each says, what counted, and how long each phase took. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cli.records import Read, plain
from decisions.stream import NEW, Input, StreamState, fold
from schemas.codec import to_json
from schemas.events import (
    Decision,
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceAdmitted,
    InferenceAnswered,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceJoined,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    InferenceStarted,
    Tensor,
    TokensGenerated,
)
from schemas.topics import CONTROL, LIFECYCLE, TOKENS

TEXT_SHOWN, TENSORS_SHOWN = 60, 4


@dataclass(frozen=True, slots=True)
class Step:
    """One record on the timeline. `plus_ms` counts from the first; `counted` is the fold's verdict, None outside `tokens`."""

    read: Read
    plus_ms: int
    detail: str
    counted: bool | None
    decisions: tuple[Decision, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What a script reads."""
        read = self.read
        return {
            "plus_ms": self.plus_ms,
            "timestamp_ms": read.timestamp_ms,
            "topic": read.topic,
            "partition": read.partition,
            "offset": read.offset,
            "event": read.name,
            "detail": self.detail,
            "counted": self.counted,
            "data": None if read.event is None else plain(to_json(read.event)),
        }


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps in order, what became of the request, and the phases' durations in milliseconds (None: it didn't come to that)."""

    request_id: str
    steps: tuple[Step, ...]
    facts: dict[str, Any]
    durations_ms: dict[str, int | None]
    tokens: dict[str, int | float | None]

    def as_json(self) -> dict[str, Any]:
        """What `headrace explain --json` prints."""
        return {
            "request_id": self.request_id,
            **self.facts,
            "durations_ms": self.durations_ms,
            "tokens": self.tokens,
            "events": [step.as_json() for step in self.steps],
        }


def is_tokens(topic: str) -> bool:
    """Whether a topic holds token streams."""
    return topic == TOKENS or topic.startswith(f"{TOKENS}.")


def build(request_id: str, records: Sequence[Read]) -> Timeline:
    """The timeline of a request's records, which are in order of time; at least one."""
    start_ms = _first(records, InferenceRequested) or records[0].timestamp_ms
    counted, state = _fold(records)
    precautions = _precautions(records)
    steps = tuple(
        Step(
            item,
            item.timestamp_ms - start_ms,
            describe(item, begun=_place(item) not in precautions),
            counted.get(_place(item)),
            tuple(getattr(item.event, "decisions", ())),
        )
        for item in records
    )
    durations, tokens = _durations(records, counted, state)
    return Timeline(request_id, steps, _facts(records, state), durations, tokens)


def _place(item: Read) -> tuple[str, int, int]:
    return item.topic, item.partition, item.offset


def _fold(records: Iterable[Read]) -> tuple[dict[tuple[str, int, int], bool], StreamState]:
    """Which records of the token stream counted, in the order of their partition."""
    state, counted = NEW, {}
    for item in sorted((r for r in records if is_tokens(r.topic)), key=_place):
        if isinstance(item.event, Input):
            state, counted[_place(item)] = fold(state, item.event)
    return counted, state


def _precautions(records: Iterable[Read]) -> set[tuple[str, int, int]]:
    """The takeovers of what nobody had begun: a worker fences all it may not have seen the end of, begun or not."""
    found: set[tuple[str, int, int]] = set()
    for item in sorted((r for r in records if is_tokens(r.topic)), key=_place):
        if isinstance(item.event, GenerationStarted):
            break
        if isinstance(item.event, GenerationTakenOver):
            found.add(_place(item))
    return found


def _first(records: Iterable[Read], kind: type[Any]) -> int | None:
    return next((item.timestamp_ms for item in records if isinstance(item.event, kind)), None)


def _facts(records: Sequence[Read], state: StreamState) -> dict[str, Any]:
    """Who asked, what served, and what became of it."""
    facts: dict[str, Any] = dict.fromkeys(
        ("tenant", "model", "version", "tier", "worker_id", "outcome", "reason", "message")
    )
    for item in records:
        for name in ("tenant", "model", "version", "tier", "worker_id"):
            facts[name] = getattr(item.event, name, None) or facts[name]
    facts["outcome"] = state.closed.outcome if state.closed else "open"
    if state.closed is not None:
        facts |= {"reason": state.closed.reason, "message": state.closed.message or None}
    refused = next((r.event for r in records if isinstance(r.event, InferenceRejected)), None)
    if state.closed is None and state.attempt is None and refused is not None:
        facts |= {"outcome": "rejected", "reason": refused.reason, "message": refused.message}
    joined = next((r.event for r in records if isinstance(r.event, InferenceJoined)), None)
    if joined is not None and joined.first_request_id != joined.request_id:
        facts |= {"outcome": f"joined {joined.first_request_id}"}
    return facts


def _durations(
    records: Sequence[Read], counted: dict[tuple[str, int, int], bool], state: StreamState
) -> tuple[dict[str, int | None], dict[str, int | float | None]]:
    """Phases by the broker's own timestamps: each from the record that opens it to the one that closes it."""
    stream = [item for item in records if counted.get(_place(item))]
    requested, scheduled = _first(records, InferenceRequested), _first(records, InferenceScheduled)
    started = _first(stream, GenerationStarted)
    chunks = [item for item in stream if isinstance(item.event, TokensGenerated) and item.event.token_ids]
    first = chunks[0].timestamp_ms if chunks else None
    ended = next(
        (
            r.timestamp_ms
            for r in stream
            if isinstance(r.event, InferenceCompleted | InferenceFailed | InferenceRejected)
        ),
        None,
    )
    durations = {
        "admission": _between(requested, scheduled),
        "queue": _between(scheduled, started),
        "prefill": _between(started, first),
        "decode": _between(first, ended),
        "first_token": _between(requested, first),
        "total": _between(requested, ended),
    }
    made = sum(state.accepted)
    decode = durations["decode"]
    rate = round((made - 1) * 1000 / decode, 1) if decode and made > 1 else None
    prompt = next(
        (i.event.prompt_tokens for i in records if isinstance(i.event, InferenceAdmitted | GenerationStarted)), None
    )
    cached = next((i.event.usage.cached_tokens for i in records if isinstance(i.event, InferenceCompleted)), None)
    return durations, {"prompt": prompt, "cached": cached, "completion": made, "per_second": rate}


def _between(start: int | None, end: int | None) -> int | None:
    return None if start is None or end is None else end - start


def describe(item: Read, *, begun: bool = True) -> str:
    """What a record says, in a few words. `begun` tells of a takeover whether an attempt came before it."""
    if item.stored is not None:
        return f"{item.stored.size_bytes} bytes in the object store"
    match item.event:
        case InferenceRequested() as event:
            if event.inputs is not None:
                return f"{event.model}: {_tensors(event.inputs)}"
            asked = event.messages[-1].content if event.messages else event.prompt
            return f"{event.model}: {_quoted(asked) if asked is not None else 'token ids'}"
        case InferenceAdmitted() as event:
            return f"to {event.work_topic}:{event.work_partition}, {event.prompt_tokens} prompt + at most {event.max_tokens} tokens"
        case InferenceScheduled() as event:
            given = f"{len(event.prompt_token_ids)} token ids" if event.inputs is None else _tensors(event.inputs)
            return f"{given}, {event.deadline_ms - event.requested_ms} ms until the deadline"
        case InferenceRejected() as event:
            return f"{event.reason}: {event.message}"
        case InferenceJoined() as event:
            place = event.first_reply
            return (
                f"asked before: its answer is the stream of {event.first_request_id} on {place.topic}:{place.partition}"
            )
        case InferenceCancelled():
            return "told to the workers" if item.topic == CONTROL else "the caller no longer wants it"
        case InferenceAnswered() as event if event.outputs:
            return _tensors(event.outputs)
        case InferenceAnswered() as event:
            return (
                f"{event.usage.completion_tokens} tokens, {', '.join(choice.finish_reason for choice in event.choices)}"
            )
        case None:
            return item.problem or ""
        case _:
            return _describe_stream(item, begun=begun)


def _describe_stream(item: Read, *, begun: bool) -> str:
    match item.event:
        case GenerationStarted() as event:
            going_on = (
                f", going on after {', '.join(map(str, event.from_tokens))} tokens" if any(event.from_tokens) else ""
            )
            if event.cache_age_ms is not None:
                return f"from the response cache, where it was {event.cache_age_ms / 1000:.1f} s old"
            return f"attempt {_attempt(event.attempt)} by {event.worker_id}, waited {event.queue_ms:.1f} ms{going_on}"
        case GenerationTakenOver() as event:
            why = "" if begun else "; a precaution after a restart: nobody had begun it"
            return f"attempt {_attempt(event.attempt)} by {event.worker_id}{why}"
        case GenerationReleased() as event:
            return f"attempt {_attempt(event.attempt)} of {event.worker_id} free to be taken over, unharmed"
        case TokensGenerated() as event:
            more = f" of choice {event.choice}" if event.choice else ""
            return f"{_span(event.first, len(event.token_ids))}{more}: {_quoted(event.text)}"
        case InferenceStarted() as event:
            place = event.position
            return f"seen at {place.topic}:{place.partition} offset {place.offset}"
        case InferenceCompleted() as event:
            if event.outputs:
                return f"{_tensors(event.outputs)}; model time {event.timings.model_ms:.0f} ms"
            ends = ", ".join(end.finish_reason for end in event.choices)
            return f"{event.usage.completion_tokens} tokens, {ends}; model time {event.timings.model_ms:.0f} ms"
        case InferenceFailed() as event:
            return f"{event.reason} ({event.source}): {event.message}"
        case _:
            return ""


def _tensors(tensors: Sequence[Tensor]) -> str:
    """Their names and shapes; the contents may be anything."""
    shown = [f"{tensor.name} {tensor.datatype}{list(tensor.shape)}" for tensor in tensors[:TENSORS_SHOWN]]
    return ", ".join(shown) + (f" and {len(tensors) - TENSORS_SHOWN} more" if len(tensors) > TENSORS_SHOWN else "")


def _attempt(attempt: Any) -> str:
    return f"{attempt.generation}.{attempt.counter}"


def _span(first: int, count: int) -> str:
    return f"token {first}" if count == 1 else f"tokens {first}-{first + count - 1}" if count else "no token"


def _quoted(text: str) -> str:
    flat = text.replace("\n", "\\n")
    return f"“{flat}”" if len(flat) <= TEXT_SHOWN else f"“{flat[:TEXT_SHOWN]}…”"


def runs(steps: Sequence[Step], shown: int = 2) -> list[Step | list[Step]]:
    """The steps with the middle of each long run of token chunks put together, so that a long answer stays readable."""
    out: list[Step | list[Step]] = []
    run: list[Step] = []

    def flush() -> None:
        if len(run) > 2 * shown + 1:
            out.extend([*run[:shown], run[shown:-1], run[-1]])
        else:
            out.extend(run)
        run.clear()

    for step in steps:
        if isinstance(step.read.event, TokensGenerated):
            run.append(step)
            continue
        if step.read.topic != LIFECYCLE or step.read.name != "InferenceStarted":
            flush()
            out.append(step)
        else:  # written beside the stream: it doesn't break a run of chunks
            out.append(step)
    flush()
    return out
