"""What processes remember and tell of themselves, and what operators change. The rules for field types are those of `events`."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.parts import ApiKey, Keyed, PartitionReport, Quota, Reply, SavedCounter, SavedHold, TensorSpec

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
