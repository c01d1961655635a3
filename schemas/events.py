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
    Keyed,
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
    Tensor,
    TensorSpec,
    Timings,
    TokenLogprob,
    Usage,
)
from schemas.quick import quick

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
    "FrontDoorSeen",
    "GenerationReleased",
    "GenerationStarted",
    "GenerationTakenOver",
    "InferenceAdmitted",
    "InferenceAnswered",
    "InferenceCancelled",
    "InferenceCompleted",
    "InferenceFailed",
    "InferenceJoined",
    "InferenceRejected",
    "InferenceRequested",
    "InferenceScheduled",
    "InferenceStarted",
    "Keyed",
    "LedgerSaved",
    "Message",
    "ModelPromoted",
    "ModelVersionRegistered",
    "PartitionReport",
    "PayloadStored",
    "Position",
    "Quota",
    "Rate",
    "Rates",
    "RecordDeadLettered",
    "Reply",
    "RequestKeyed",
    "Sampling",
    "SavedCounter",
    "SavedHold",
    "SchemaPublished",
    "Slot",
    "StreamEvent",
    "TenantChanged",
    "Tensor",
    "TensorSpec",
    "Timings",
    "TokenLogprob",
    "TokensGenerated",
    "Usage",
    "WorkerReported",
]

# --- requests.<tier> -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferenceRequested:
    """A caller asks. Exactly one of `messages`, `prompt`, `prompt_token_ids`, `inputs` is given. The tenant comes from the record's grant.

    `inputs` are a tensor model's; of its outputs those named in `outputs` are wanted, all if none is. `parameters` are its processor's.

    `timeout_ms` counts from the record's own timestamp; None takes the model's default. `stream` false lets the worker send larger chunks.
    What is asked again under one `idempotency_key` is answered by the first's stream. Where such a call has several requests, `call` tells
    each of them what they ask together and which of them it is.
    `cache_control` has the words of HTTP's header: `no-cache`, `no-store`, `max-age=SECONDS`.
    `door` is the front door that cancels it when its caller leaves (see `FrontDoorSeen`); empty if nobody does.
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
    idempotency_key: str = ""
    call: str = ""
    cache_control: str | None = None
    inputs: tuple[Tensor, ...] | None = None
    outputs: tuple[str, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)
    door: str = ""


@dataclass(frozen=True, slots=True)
class InferenceCancelled:
    """A caller no longer wants the answer. On `requests.*` by the caller; on `control` for all workers, once admission has seen it."""

    request_id: str
    tenant: str = ""


# --- work.<model>.<version>.<tier> -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferenceScheduled:
    """Work for a worker: what to generate or infer, under which limits, and where to send it. `sampling.max_tokens` is resolved.

    Of a tensor model `inputs` are given, prepared as far as its processor does that in admission, and `prompt_tokens` counts the tokens in them.

    `rates` is what the tenant had left of its limits then; the first start carries it on to the caller. `cache_key` names the answer in the
    response cache, and is empty if it may not be stored; `shared` says that equal work in progress may have one answer.
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
    cache_key: str = ""
    shared: bool = False
    inputs: tuple[Tensor, ...] | None = None
    outputs: tuple[str, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0


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


# --- lifecycle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InferenceAdmitted:
    """Admission let a request in: the routing decision, what it reserves in which scopes of the tenant's ledger, and every check on the way.

    It is void if its record's own time is later than `valid_until_ms` (0: never): its writer may have lost the partition by then.
    `keyed` says by what it is known when it is asked again.
    What is `cached` is answered from the response cache: it runs nowhere. `door` is that of the request.
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
    keyed: Keyed | None = None
    cached: bool = False
    door: str = ""


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
    """The whole result of a finished request, as folded. `error_reason` is set, and choices hold what came, if it failed.

    `cache_key` names it in the response cache; it is empty if it may not be stored there, or came from there.
    `retry_after_ms` is that of the refusal: None if it was none, or waiting is unknown to help.
    """

    request_id: str
    tenant: str
    model: str
    version: str
    tier: str
    choices: tuple[ChoiceAnswer, ...]
    usage: Usage
    error_reason: str | None = None
    error_message: str | None = None
    cache_key: str = ""
    outputs: tuple[Tensor, ...] = ()
    retry_after_ms: int | None = None


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


# --- idempotency.<tier> ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestKeyed:
    """A request that was let in has used a key: whoever asks again under it joins this one's stream. `free`: not any more, since it failed.

    `requested_ms` is when it was asked: a key is remembered for a day from then on.
    """

    tenant: str
    tier: str
    keyed: Keyed
    request_id: str
    reply: Reply
    model: str
    requested_ms: int
    free: bool = False


# --- in the place of an event that is too large for a record ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PayloadStored:
    """An event too large for a record is in the object store: under its tenant, by the SHA-256 of its object, in lower-case hex.

    `event` is its name. `outline` is the same event without its content, encoded: what a reader knows before, or without, the object.
    """

    request_id: str
    tenant: str
    event: str
    digest: str
    size_bytes: int
    outline: bytes | None = None


# --- doors, workers, tenants, registry, schemas, dead-letters --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontDoorSeen:
    """A front door is there, as of the record's timestamp: told every second while it has calls open. `door` names one run of its process.

    `adopted` are the requests whose streams are read here by callers who have come back, wherever they had asked.
    """

    door: str
    adopted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A worker's state, as of the record's timestamp. `state`: `starting`, `ready`, `draining` or `stopped`.

    `service_ms` is how long a request has run in a slot, on the average of the last ones; `start_up_ms` how long the worker took to be ready.
    Both are 0 until they are known. `window_records` is how many records of each partition it looks at; 0 if it doesn't say. `tiers` are those that it
    serves; none if it doesn't say, which was all.
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
    window_records: int = 0
    tiers: tuple[str, ...] = ()


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

    `max_queue_depth` is by tier how many requests may wait for a slot; a tier that isn't named has no such limit. `interactive_slots` of a worker's
    slots are used by no other tier; None keeps one in eight.

    Answers stay in the response cache for `cache_ttl_ms` (0: it has none), those of all versions of the model in `cache_bytes`; `cache_hit_cost`
    says what one from there costs its tenant: a request, or `tokens` as if it had been generated.

    A tensor model has `inputs` and `outputs`, those that its callers see. Its `processor` makes the model's own tensors of them, and is empty
    where they are the same. `batched` says that the first dimension of all the file's own tensors counts rows, of which there may be any number, as
    many in each; `fixed_rows` is how many rows the file always takes at once, 0 where that may differ. Versions that were registered before there
    were these two have neither: what they would refuse is refused by the worker alone.
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
    interactive_slots: int | None = None
    cache_ttl_ms: int = 0
    cache_bytes: int = 64 * 1024 * 1024
    cache_hit_cost: str = "requests"
    processor: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batched: bool = False
    fixed_rows: int = 0


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
    | InferenceJoined
    | InferenceAdmitted
    | InferenceRejected
    | InferenceStarted
    | InferenceAnswered
    | PayloadStored
    | LedgerSaved
    | RequestKeyed
    | FrontDoorSeen
    | WorkerReported
    | TenantChanged
    | ModelVersionRegistered
    | ModelPromoted
    | SchemaPublished
    | RecordDeadLettered
    | DeadLetterSettled
)
EVENT_TYPES: tuple[type[Event], ...] = Event.__args__
for _type in EVENT_TYPES:
    quick(_type)
StreamEvent = (
    GenerationStarted
    | TokensGenerated
    | GenerationTakenOver
    | GenerationReleased
    | InferenceCompleted
    | InferenceFailed
)
