"""Every event, as a frozen dataclass: what happened, in the past tense, with its one-line meaning.

They stand by theme in `request_events`, `stream_events` and `state_events`, and are had from here.

Field types are limited to what `avro_form` maps: str, int (64 bits), float, bool, bytes, another dataclass, `X | None`, `tuple[X, ...]`
and `dict[str, X]`. Times are milliseconds since 1970 and end in `_ms`. A field added later needs a default, or old records can't be read.
"""

from __future__ import annotations

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
from schemas.request_events import (
    InferenceAdmitted,
    InferenceAnswered,
    InferenceCancelled,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    InferenceStarted,
    PayloadStored,
)
from schemas.state_events import (
    DeadLetterSettled,
    FrontDoorSeen,
    LedgerSaved,
    ModelPromoted,
    ModelVersionRegistered,
    RecordDeadLettered,
    RequestKeyed,
    SchemaPublished,
    TenantChanged,
    WorkerReported,
)
from schemas.stream_events import (
    GenerationReleased,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    InferenceJoined,
    TokensGenerated,
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
