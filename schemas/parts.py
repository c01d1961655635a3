"""The parts that events are made of. The rules for field types are those of `events`."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.quick import quick

STOPS_MAX = 16
"""Stop strings of one request."""
STOP_CHARS_MAX = 256
"""Characters of one stop string."""


@quick
@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One try at a request, ordered: first by the generation of the owner's consumer group, then by the owner's own counter."""

    generation: int
    counter: int


@quick
@dataclass(frozen=True, slots=True)
class Reply:
    """Where the answer goes: a partition of a `tokens` topic, and whether its records are `avro` or `json`."""

    topic: str
    partition: int
    encoding: str = "avro"


@quick
@dataclass(frozen=True, slots=True)
class Position:
    """A place in the log."""

    topic: str
    partition: int
    offset: int


@quick
@dataclass(frozen=True, slots=True)
class Keyed:
    """By what a request is known when it is asked again: the SHA-256 (hex) of its key, and of all that it asks."""

    key: str
    fingerprint: str


@quick
@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str
    name: str | None = None


@quick
@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when to stop. `logprobs` is the number of alternatives a token (0: the chosen one alone), or None.

    `top_k` 0 means all. `max_tokens` None means what is left of the context. `logit_bias` maps a token id, in decimal, to its bias.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logit_bias: dict[str, float] = field(default_factory=dict)


@quick
@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor: `datatype` and `shape` as in the Open Inference Protocol, `data` its elements as `schemas.tensors` says."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@quick
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model takes or gives under a name; an extent of -1 may be any."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@quick
@dataclass(frozen=True, slots=True)
class Decision:
    """One step of a decision: which check, what it found (`passed`, `refused` or a choice), and on what grounds."""

    check: str
    outcome: str
    detail: str = ""


@quick
@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have come at some place. `text` is its bytes, which may be part of a character."""

    token_id: int
    text: bytes
    logprob: float


@quick
@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token's log-probability, and the likeliest alternatives, best first."""

    token_id: int
    text: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How one choice ended: tokens made, `stop` or `length`, the stop string or token id that matched, and text still held back."""

    choice: int
    total: int
    finish_reason: str
    stop_reason: str | None = None
    text: str = ""


@quick
@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One choice, whole."""

    choice: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@quick
@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request used; `cached_tokens` of the prompt were already in the engine's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@quick
@dataclass(frozen=True, slots=True)
class Timings:
    """A worker's own durations: waiting in the log and the window, from start to first token, from start to end."""

    queue_ms: float = 0.0
    first_token_ms: float = 0.0
    model_ms: float = 0.0


@quick
@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key of a tenant; only its SHA-256 (hex) is kept."""

    key_id: str
    sha256: str
    tiers: tuple[str, ...]
    created_ms: int
    revoked_ms: int | None = None
    name: str = ""


@quick
@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What a worker holds of one work partition: the offset committed, and the records it finished above it."""

    topic: str
    partition: int
    committed: int
    finished_above: int


@quick
@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tier. `key_id` and `model` say what they count: "" all together, a name that one alone, `*` each apart.

    A limit that is None doesn't limit. Tokens are prompt + generated. Days and months are the calendar's, in UTC. `reserved_percent` is no limit:
    that much of the model's slots is kept for the tenant.
    """

    tier: str
    key_id: str = ""
    model: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    reserved_percent: int | None = None


@quick
@dataclass(frozen=True, slots=True)
class Rate:
    """A limit as OpenAI's headers tell it: a request that needs no more than `remaining` would be let in now.

    `reset_ms` is how long until all of it is free again, if no other request comes and what runs has ended by then.
    """

    limit: int
    remaining: int
    reset_ms: int


@quick
@dataclass(frozen=True, slots=True)
class Rates:
    """Of all limits on requests and on tokens over time, the one of each with the least left; None if there is none."""

    requests: Rate | None = None
    tokens: Rate | None = None


@quick
@dataclass(frozen=True, slots=True)
class Slot:
    """Charges that expire together: requests, tokens used by those that ended, and tokens held by those that stand."""

    opened_ms: int
    expires_ms: int
    requests: int = 0
    spent: int = 0
    held: int = 0


@quick
@dataclass(frozen=True, slots=True)
class SavedCounter:
    """One scope's counter: see `decisions.ledger.Counter`."""

    scope: str
    clock_ms: int
    running: int
    held: int
    minute: tuple[Slot, ...]
    day: tuple[Slot, ...]
    month: tuple[Slot, ...]
    requests_total: int
    tokens_total: int


@quick
@dataclass(frozen=True, slots=True)
class SavedHold:
    """What an open request holds: charged at that time, in these scopes. It must have ended at `last_ms`; its stream is at `reply`.

    `pool` is the model version that serves it, as `model version`; `begun` says whether a worker has begun it. `door` is that of its request,
    `key_id` the key it was asked with.
    """

    request_id: str
    charged_ms: int
    tokens: int
    requests: int
    running: int
    last_ms: int
    scopes: tuple[str, ...]
    reply: Reply | None = None
    pool: str = ""
    begun: bool = False
    door: str = ""
    key_id: str = ""
