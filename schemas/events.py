"""Every event, as a frozen dataclass: what happened, in the past tense, with its one-line meaning.

Field types are limited to what `avro_form` maps: str, int (64 bits), float, bool, bytes, another dataclass, `X | None`, `tuple[X, ...]`
and `dict[str, X]`. Times are milliseconds since 1970 and end in `_ms`. A field added later needs a default, or old records can't be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.parts import (
    Alternative,
    ApiKey,
    Attempt,
    ChoiceAnswer,
    ChoiceEnd,
    Decision,
    Message,
    PartitionReport,
    Position,
    Quota,
    Rate,
    Rates,
    Reply,
    Sampling,
    SavedCounter,
    SavedHold,
    Slot,
    Timings,
    TokenLogprob,
    Usage,
)

__all__ = [
    "EVENT_TYPES",
    "Alternative",
    "ApiKey",
    "Attempt",
    "ChoiceAnswer",
    "ChoiceEnd",
    "DeadLetterSettled",
    "Decision",
    "Event",
    "GenerationReleased",
    "GenerationStarted",
    "GenerationTakenOver",
    "InferenceAdmitted",
    "InferenceAnswered",
    "InferenceCancelled",
    "InferenceCompleted",
    "InferenceFailed",
    "InferenceRejected",
    "InferenceRequested",
    "InferenceScheduled",
    "InferenceStarted",
    "LedgerSaved",
    "Message",
    "ModelPromoted",
    "ModelVersionRegistered",
    "PartitionReport",
    "Position",
    "Quota",
    "Rate",
    "Rates",
    "RecordDeadLettered",
    "Reply",
    "Sampling",
    "SavedCounter",
    "SavedHold",
    "SchemaPublished",
    "Slot",
    "StreamEvent",
    "TenantChanged",
    "Timings",
    "TokenLogprob",
    "TokensGenerated",
    "Usage",
    "WorkerReported",
]

# --- requests.<tier> -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferenceRequested:
    """A caller asks. Exactly one of `messages`, `prompt`, `prompt_token_ids` is given. The tenant comes from the record's grant.

    `timeout_ms` counts from the record's own timestamp; None takes the model's default. `stream` false lets the worker send larger chunks.
    """

    request_id: str
    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    timeout_ms: int | None = None
    stream: bool = True
    user: str | None = None


@dataclass(frozen=True, slots=True)
class InferenceCancelled:
    """A caller no longer wants the answer. On `requests.*` by the caller; on `control` for all workers, once admission has seen it."""

    request_id: str
    tenant: str = ""


# --- work.<model>.<version>.<tier> -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferenceScheduled:
    """Work for a worker: what to generate, under which limits, and where to send it. `sampling.max_tokens` is resolved.

    `rates` is what the tenant had left of its limits then; the first start carries it on to the caller.
    """

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    deadline_ms: int
    requested_ms: int
    reply: Reply
    cache_salt: str
    stream: bool = True
    source: Position | None = None
    time_limit_ms: int | None = None
    rates: Rates | None = None


# --- tokens, tokens.<tenant> -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """A worker began, or went on, generating; `from_tokens` counts, for each choice, the tokens it goes on from."""

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
    """The answer is whole. On `tokens` by the worker, with `attempt`; on `lifecycle` as folded."""

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


# --- lifecycle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferenceAdmitted:
    """Admission let a request in: the routing decision, what it reserves in which scopes of the tenant's ledger, and every check on the way.

    It is void if its record's own time is later than `valid_until_ms` (0: never): its writer may have lost the partition by then.
    """

    request_id: str
    tenant: str
    key_id: str
    model: str
    version: str
    tier: str
    reply: Reply
    work_topic: str
    work_partition: int
    prompt_tokens: int
    max_tokens: int
    reserved_tokens: int
    requested_ms: int
    deadline_ms: int
    source: Position
    decisions: tuple[Decision, ...] = ()
    time_limit_ms: int | None = None
    scopes: tuple[str, ...] = ("",)
    valid_until_ms: int = 0


@dataclass(frozen=True, slots=True)
class InferenceRejected:
    """Admission refused a request. Goes to `lifecycle` and to the caller's `tokens` partition."""

    request_id: str
    tenant: str
    model: str
    tier: str
    reason: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    requested_ms: int = 0
    source: Position | None = None
    decisions: tuple[Decision, ...] = ()
    rates: Rates | None = None


@dataclass(frozen=True, slots=True)
class InferenceStarted:
    """The fold saw a request's first start, at this place in `tokens`."""

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    attempt: Attempt
    worker_id: str
    queue_ms: float
    position: Position


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferenceAnswered:
    """The whole result of a finished request, as folded. `error_reason` is set, and choices hold what came, if it failed."""

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    choices: tuple[ChoiceAnswer, ...]
    usage: Usage
    error_reason: str | None = None
    error_message: str | None = None


# --- ledger.<tier> ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LedgerSaved:
    """A tenant's ledger as `lifecycle` tells it in the records before `through`: so much need not be read again.

    With no tenant it says that of the whole partition: reading on from `start` finds all that the rows don't hold.
    """

    tenant: str
    tier: str
    through: int
    saved_ms: int
    start: int = 0
    counters: tuple[SavedCounter, ...] = ()
    open: tuple[SavedHold, ...] = ()


# --- workers, tenants, registry, schemas, dead-letters ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A worker's state, as of the record's timestamp. `state`: `starting`, `ready`, `draining` or `stopped`.

    `service_ms` is how long a request has run in a slot, on the average of the last ones; `start_up_ms` how long the worker took to be ready.
    Both are 0 until they are known.
    """

    worker_id: str
    model: str
    version: str
    state: str
    partitions: tuple[PartitionReport, ...]
    slots: int
    running: int
    waiting: int
    finished: int = 0
    kv_cache_use: float | None = None
    tokens_per_s: float = 0.0
    digest: str = ""
    started_ms: int = 0
    service_ms: float = 0.0
    start_up_ms: int = 0


@dataclass(frozen=True, slots=True)
class TenantChanged:
    """A tenant's whole state: its keys, its limits, and the salt that keeps its prefix cache apart from others'.

    The tenant `*` has no keys; its quotas hold for tenants that have none of their own on that tier.
    """

    tenant: str
    cache_salt: str
    keys: tuple[ApiKey, ...]
    created_ms: int
    disabled: bool = False
    quotas: tuple[Quota, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelVersionRegistered:
    """A model version may be served: by which engine, from which weights, within which limits. `engine_args` is a JSON object.

    `max_queue_depth` is by tier how many requests may wait for a slot; a tier that isn't named has no such limit.
    """

    model: str
    version: str
    engine: str
    artifact: str
    context_length: int
    tokenizer: str = ""
    engine_args: str = "{}"
    slots: int = 8
    partitions: int = 4
    tiers: tuple[str, ...] = ("interactive", "batch")
    default_timeout_ms: int = 600_000
    created_ms: int = 0
    digest: str = ""
    time_limit_ms: int = 3_600_000
    max_queue_depth: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelPromoted:
    """Requests for the model's name go to this version from now on."""

    model: str
    version: str


@dataclass(frozen=True, slots=True)
class SchemaPublished:
    """A writer's schema, so that any reader can resolve it. Always written as JSON."""

    fingerprint: str
    name: str
    schema: str


@dataclass(frozen=True, slots=True)
class RecordDeadLettered:
    """A record that can't be processed: the raw bytes without the authorisation header, where it was, and why it was refused."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]
    reason: str
    message: str
    process: str


@dataclass(frozen=True, slots=True)
class DeadLetterSettled:
    """An operator has dealt with the dead letter at this offset of `dead-letters`: `dropped`, or `retried` as the request `request_id`."""

    letter: int
    outcome: str
    request_id: str = ""


Event = (
    InferenceRequested
    | InferenceCancelled
    | InferenceScheduled
    | GenerationStarted
    | TokensGenerated
    | GenerationTakenOver
    | GenerationReleased
    | InferenceCompleted
    | InferenceFailed
    | InferenceAdmitted
    | InferenceRejected
    | InferenceStarted
    | InferenceAnswered
    | LedgerSaved
    | WorkerReported
    | TenantChanged
    | ModelVersionRegistered
    | ModelPromoted
    | SchemaPublished
    | RecordDeadLettered
    | DeadLetterSettled
)
EVENT_TYPES: tuple[type[Event], ...] = Event.__args__
StreamEvent = (
    GenerationStarted
    | TokensGenerated
    | GenerationTakenOver
    | GenerationReleased
    | InferenceCompleted
    | InferenceFailed
)
