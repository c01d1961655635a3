"""What belongs in which topic, and what can be asked again of a record that was put aside."""

from __future__ import annotations

import re
from dataclasses import replace

from schemas.codec import Codec, own_schemas
from schemas.errors import HeadraceError, Undecodable
from schemas.events import (
    Event,
    FrontDoorSeen,
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
    LedgerSaved,
    ModelPromoted,
    ModelVersionRegistered,
    PayloadStored,
    RecordDeadLettered,
    RequestKeyed,
    Sampling,
    SchemaPublished,
    TenantChanged,
    WorkerReported,
)
from schemas.payloads import refusal
from schemas.reasons import Reason
from schemas.topics import (
    ANSWERS,
    CONTROL,
    DEAD_LETTERS,
    DOORS,
    LIFECYCLE,
    REGISTRY,
    SCHEMAS,
    TENANTS,
    TIERS,
    TOKENS,
    WORKERS,
    core_topics,
    idempotency_topic,
    ledger_topic,
    requests_topic,
)

BELONGING: dict[str, tuple[type[Event], ...]] = {
    LIFECYCLE: (
        InferenceAdmitted,
        InferenceRejected,
        InferenceJoined,
        InferenceStarted,
        InferenceCompleted,
        InferenceFailed,
    ),
    ANSWERS: (InferenceAnswered, PayloadStored),
    CONTROL: (InferenceCancelled,),
    DOORS: (FrontDoorSeen,),
    WORKERS: (WorkerReported,),
    TENANTS: (TenantChanged,),
    REGISTRY: (ModelVersionRegistered, ModelPromoted),
    SCHEMAS: (SchemaPublished,),
    **{ledger_topic(tier): (LedgerSaved,) for tier in TIERS},
    **{idempotency_topic(tier): (RequestKeyed,) for tier in TIERS},
}
"""The topics whose readers pass over what they can't read, and what belongs there. One reader, `streams/dead_letters`, puts all else aside."""

ELSEWHERE = {
    **{requests_topic(tier): f"admission of the tier {tier}" for tier in TIERS},
    TOKENS: "endings",
    DEAD_LETTERS: "nobody: what can't be read there is counted",
}
"""Who puts records of the other topics aside. Those of `work.*` are their workers'."""

_COMPACTED = frozenset(spec.name for spec in core_topics() if spec.compacted)
_ASKED = re.compile(r"(requests|work|tokens)(\..+)?")
_INSTEAD = {
    TENANTS: "say again what the tenant shall have (`headrace tenants`)",
    REGISTRY: "register or promote the version again (`headrace models`)",
    SCHEMAS: "restart the process that wrote it, which publishes what is missing",
    WORKERS: "the worker reports again by itself",
    DOORS: "the front door tells again by itself",
    CONTROL: "cancel the request again, if it still runs (`DELETE /v1/streams/ID`)",
    LIFECYCLE: "it could be counted twice, and `tokens` has told whoever waits (`headrace explain ID`)",
    ANSWERS: "its caller reads the stream again, or asks anew (`headrace explain ID`)",
    "ledger": "ledgers are folded from `lifecycle`",
    "idempotency": "keys are remembered from `lifecycle`",
}


# --- what belongs where -------------------------------------------------------------------------------------------------


def misplaced(topic: str, key: bytes | None, event: Event | None) -> str | None:
    """Why a record doesn't belong in a topic of `BELONGING`; None if it does. No event is a record without a value."""
    if event is None:
        return _no_value(topic, key)
    if not isinstance(event, BELONGING[topic]):
        return f"{type(event).__name__} doesn't belong in {topic}"
    if isinstance(event, PayloadStored) and event.event != InferenceAnswered.__name__:
        return f"a reference to {event.event[:100]!r} doesn't belong in {topic}"
    return _unusable(event) if isinstance(event, SchemaPublished) else None


def _no_value(topic: str, key: bytes | None) -> str | None:
    if topic not in _COMPACTED:
        return "the record has no value"
    try:
        (key or b"").decode()
    except UnicodeDecodeError:
        return "the record removes what has no name: its key is no text"
    return None


def _unusable(event: SchemaPublished) -> str | None:
    """Why nobody can read by a schema. One of an event that this version doesn't have is a newer one's."""
    if event.name not in own_schemas():
        return None
    try:
        Codec().learn(event)
    except Undecodable as error:
        return error.message
    return None


# --- which letters are one ----------------------------------------------------------------------------------------------


class Letters:
    """Which letters are of one record: who crashes after it has put a record aside does it again. The first one counts."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int, int, int], int] = {}
        self._same: dict[int, int] = {}

    def hear(self, number: int, letter: RecordDeadLettered) -> bool:
        """A letter, by its offset, in order; whether its record is put aside for the first time."""
        place = letter.topic, letter.partition, letter.offset, letter.timestamp_ms
        first = self._first.setdefault(place, number)
        if first != number:
            self._same[number] = first
        return first == number

    def number(self, number: int) -> int:
        """The number of the letter that this one is."""
        return self._same.get(number, number)


# --- what can be asked again --------------------------------------------------------------------------------------------


def askable(topic: str) -> None:
    """Returns if records of this topic are requests on their way. Raises HeadraceError (invalid_request) that says what to do about others.

    Written again, what tells of the past would be told twice, and what tells of the present would be old.
    """
    if _ASKED.fullmatch(topic):
        return
    instead = _INSTEAD.get(topic) or _INSTEAD.get(topic.split(".", maxsplit=1)[0]) or "there is nothing to ask again"
    text = f"a record of {topic} is not written again: {instead}; then drop the letter"
    raise HeadraceError(Reason.INVALID_REQUEST, text)


def asked_again(event: object, request_id: str) -> InferenceRequested:
    """The request in a record, under a new id: its own may have been answered, and what is closed stays closed.

    Scheduled work is asked with the token ids that it had. Raises HeadraceError (invalid_request) for whatever is neither.
    """
    match event:
        case InferenceRequested():
            return replace(event, request_id=request_id, door="")  # nobody watches it
        case InferenceScheduled():
            return InferenceRequested(
                request_id,
                event.model,
                prompt_token_ids=event.prompt_token_ids if event.inputs is None else None,
                sampling=event.sampling if event.inputs is None else Sampling(),
                stream=event.stream,
                inputs=event.inputs,
                outputs=event.outputs,
                parameters=event.parameters,
            )
        case None:
            raise HeadraceError(Reason.INVALID_REQUEST, "it is no event, so there is nothing to ask again; drop it")
        case _:
            raise _no_request(type(event).__name__)


def followed(reference: PayloadStored, tenant: str) -> None:
    """Returns if a record's reference may be read to ask it again for this tenant.

    It names a place of the tenant's own, and holds a request or scheduled work. Raises HeadraceError (invalid_request, permission_denied,
    payload_too_large).
    """
    kinds = {kind.__name__: kind for kind in (InferenceRequested, InferenceScheduled)}
    if reference.event not in kinds:
        raise _no_request(reference.event)
    if (unfollowed := refusal(reference, tenant, kinds[reference.event])) is not None:
        raise unfollowed


def _no_request(name: str) -> HeadraceError:
    text = f"{name} is no request, so there is nothing to ask again; drop it"
    return HeadraceError(Reason.INVALID_REQUEST, text)


def tier_of(topic: str, event: object) -> str:
    """The tier in which a record was asked. Raises HeadraceError (invalid_request) if neither its topic nor the event says."""
    if isinstance(event, InferenceScheduled):
        return event.tier
    for tier in TIERS:
        if topic == requests_topic(tier):
            return tier
    raise HeadraceError(Reason.INVALID_REQUEST, f"{topic} belongs to no tier, so nothing can be asked again there")


def tenant_of(key: bytes | None, event: object) -> str | None:
    """Whose record it was, as far as it says: scheduled work names its tenant, a request's key does by custom, and a reference if nothing else does."""
    if isinstance(event, InferenceScheduled):
        return event.tenant
    if isinstance(event, PayloadStored) and (key is None or event.event == InferenceScheduled.__name__):
        return event.tenant
    return None if key is None else key.decode(errors="replace")
