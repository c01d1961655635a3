"""A request on its way: asked, let in or refused, sent to a worker, answered. The rules for field types are those of `events`."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.parts import (
    Attempt,
    ChoiceAnswer,
    Decision,
    Keyed,
    Message,
    Position,
    Rates,
    Reply,
    Sampling,
    Tensor,
    Usage,
)

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
