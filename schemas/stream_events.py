"""A request's stream on `tokens`. The rules for field types are those of `events`."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.parts import Attempt, ChoiceEnd, Position, Rates, Reply, Sampling, Tensor, Timings, TokenLogprob, Usage

# --- tokens, tokens.<tenant> -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """A worker began, or went on, generating; `from_tokens` counts, for each choice, the tokens it goes on from.

    `cache_key` is that of the work. `cache_age_ms` says that the answer comes from the response cache, and how old it is there.
    """

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    attempt: Attempt
    from_tokens: tuple[int, ...]
    prompt_tokens: int
    worker_id: str
    queue_ms: float = 0.0
    sampling: Sampling | None = None
    rates: Rates | None = None
    cache_key: str = ""
    cache_age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New tokens of one choice: `first` counts the tokens before them; `text` is what may be shown after them and not before."""

    request_id: str
    choice: int
    attempt: Attempt
    first: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class GenerationTakenOver:
    """Another worker owns the request now; whatever a former owner still sends no longer counts."""

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    attempt: Attempt
    worker_id: str


@dataclass(frozen=True, slots=True)
class GenerationReleased:
    """The owner may lose the request unharmed (it drains, or its group shares anew): that won't count as a failure.

    It goes on until another takes over. If it keeps the request it starts the same attempt again.
    """

    request_id: str
    attempt: Attempt
    worker_id: str


@dataclass(frozen=True, slots=True)
class InferenceCompleted:
    """The answer is whole. On `tokens` by the worker, with `attempt`; on `lifecycle` as folded, without `outputs`: those of a tensor model."""

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    attempt: Attempt
    choices: tuple[ChoiceEnd, ...]
    usage: Usage
    timings: Timings
    worker_id: str
    outputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class InferenceFailed:
    """The answer will not become whole. The `attempt` that failed tells its `totals`; `if_not_started` ends what nobody began; a cancel sets neither.

    On `lifecycle`, as folded, `totals` and `usage` tell what the caller got and pays for.
    """

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    reason: str
    message: str
    attempt: Attempt | None = None
    totals: tuple[int, ...] = ()
    if_not_started: bool = False
    usage: Usage | None = None
    source: str = "worker"


@dataclass(frozen=True, slots=True)
class InferenceJoined:
    """The request was asked before: the stream of the first, at `first_reply`, is its answer, from its start. It has no stream of its own.

    On `lifecycle` too. `first_requested_ms` is when the first was asked: nothing of its stream is older.
    """

    request_id: str
    tenant: str
    model: str
    tier: str
    first_request_id: str
    first_reply: Reply
    first_requested_ms: int
    requested_ms: int = 0
    source: Position | None = None
