"""Events that are too large for a record: what their object holds, what the record tells instead, and what stands for one that is lost.

A claim check. The object of most events is the event, encoded. Of one with token ids it is the ids alone, four bytes each, after the request's
id: Avro takes seconds for millions of them, and holds up everything else meanwhile. The outline in the record holds the rest.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace

from schemas.codec import HEADER_BYTES, MARKER, Codec, encode, encode_json, published
from schemas.errors import HeadraceError, Undecodable
from schemas.events import (
    Event,
    InferenceAnswered,
    InferenceCompleted,
    InferenceFailed,
    InferenceRequested,
    InferenceScheduled,
    PayloadStored,
    TokensGenerated,
)
from schemas.ids import REQUEST_ID_CHARS, is_request_id
from schemas.reasons import Reason
from schemas.topics import INLINE_MAX_BYTES, REQUEST_MAX_BYTES, check_word

FOLDER = "payloads"
"""What the keys of all payloads begin with."""
TOKEN_ID_BYTES = 4
TOKEN_IDS_MAX = REQUEST_MAX_BYTES // 2
"""A request's token ids, at most: in JSON each takes two bytes or more."""
TOKEN_IDS_INLINE_MAX = INLINE_MAX_BYTES // TOKEN_ID_BYTES
"""An event with more token ids than these isn't encoded whole to find out how large it is."""
ENVELOPE_BYTES = 64 * 1024
"""What a request's encoding may have around what was taken."""
OBJECT_MAX_BYTES = 64 * 1024 * 1024
"""No payload is larger."""
IDS_A_STEP = 65_536
ID_AVRO_BYTES_MAX, UTF8_BYTES_MAX = 5, 4

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEADS = {"avro": encode, "json": encode_json}

Stored = InferenceRequested | InferenceScheduled | TokensGenerated | InferenceCompleted | InferenceAnswered
"""The events that may be in the object store."""


class PayloadUnreadable(Undecodable):
    """An event can't be read from the object store: its object is gone or damaged (payload_lost), or the store is away (unavailable).

    Attributes:
        reference: the record's own event.
        outline: what it tells of the event, or None.
    """

    def __init__(self, reason: Reason, message: str, reference: PayloadStored, outline: Stored | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.reference = reference
        self.outline = outline


# --- writing ---------------------------------------------------------------------------------------------------------


def too_many_ids(event: Event) -> bool:
    """Whether an event's token ids alone make it too large for a record."""
    return len(_ids(event) or ()) > TOKEN_IDS_INLINE_MAX


def may_be_large(event: InferenceRequested | InferenceScheduled) -> bool:
    """Whether an event may be too large for a record, by an upper bound that costs nothing: it is stored before anything hangs on it."""
    size = ENVELOPE_BYTES + ID_AVRO_BYTES_MAX * len(event.prompt_token_ids or ())
    if isinstance(event, InferenceRequested):
        texts = [event.prompt or "", *(message.content for message in event.messages or ())]
        size += UTF8_BYTES_MAX * sum(map(len, texts))
    if not (event.outputs or event.parameters or event.inputs):
        return size > INLINE_MAX_BYTES
    names = [*event.outputs, *event.parameters, *event.parameters.values(), *(each.name for each in event.inputs or ())]
    size += UTF8_BYTES_MAX * sum(map(len, names))
    size += sum(len(tensor.data) for tensor in event.inputs or ())
    return size > INLINE_MAX_BYTES


def claim(event: Stored, encoded: bytes | None, tenant: str, encoding: str) -> tuple[PayloadStored, bytes]:
    """An event's reference, and what its object holds. `encoded` is the event's own encoding where that is known."""
    ids = _ids(event)
    if ids is not None:
        content = event.request_id.encode() + _packed(ids)
    else:
        content = encoded if encoded is not None else _HEADS[encoding](event)
    digest = hashlib.sha256(content).hexdigest()
    outline = _HEADS[encoding](without_content(event, PAYLOAD_LOST_TEXT))
    return PayloadStored(event.request_id, tenant, type(event).__name__, digest, len(content), outline), content


PAYLOAD_LOST_TEXT = Reason.PAYLOAD_LOST.text


def without_content(event: Stored, error_message: str, reason: Reason = Reason.PAYLOAD_LOST) -> Stored:
    """An event without what makes it large. An answer without its content says that it has none, and why."""
    match event:
        case InferenceRequested(prompt_token_ids=None):
            return replace(event, messages=None, prompt=None, inputs=None)
        case InferenceScheduled() if event.inputs is not None:
            return replace(event, inputs=())
        case InferenceRequested() | InferenceScheduled():
            return replace(event, prompt_token_ids=())
        case TokensGenerated():
            return replace(event, text="", logprobs=None)  # its ids are few, and a fold needs no more
        case InferenceCompleted():
            return replace(event, choices=tuple(replace(end, text="") for end in event.choices), outputs=())
        case InferenceAnswered():
            return replace(event, choices=(), outputs=(), error_reason=reason.value, error_message=error_message)


def _ids(event: Event) -> tuple[int, ...] | None:
    """The token ids that are all of an event's content, or None."""
    if not isinstance(event, InferenceRequested | InferenceScheduled) or event.inputs is not None:
        return None
    return event.prompt_token_ids


def _packed(ids: tuple[int, ...]) -> bytes:
    try:
        packed = array("I", ids)
    except OverflowError:
        raise HeadraceError(Reason.INVALID_REQUEST, "a token id is no whole number of 32 bits") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


# --- reading ---------------------------------------------------------------------------------------------------------


def key_of(reference: PayloadStored) -> str:
    """Where the object is. Raises `Undecodable` for a reference that names no place of its own."""
    if not _DIGEST.fullmatch(reference.digest):
        raise Undecodable("`digest` must be a SHA-256 in 64 lower-case hex digits", param="digest")
    if not is_request_id(reference.request_id):
        raise Undecodable("`request_id` must be a UUID of version 7 in lower case", param="request_id")
    if not 0 < reference.size_bytes <= OBJECT_MAX_BYTES:
        raise Undecodable(f"`size_bytes` must be between 1 and {OBJECT_MAX_BYTES}", param="size_bytes")
    try:
        return f"{FOLDER}/{check_word('tenant', reference.tenant)}/{reference.digest}"
    except HeadraceError as error:
        raise Undecodable(error.message, param="tenant") from None


def refusal(
    reference: PayloadStored, tenant: str, kind: type[InferenceRequested | InferenceScheduled] = InferenceRequested
) -> HeadraceError | None:
    """Why a caller's reference isn't followed, or None: it is to be a request (or another `kind`) of the caller's own tenant, no larger than is taken."""
    if reference.tenant != tenant:
        return HeadraceError(Reason.PERMISSION_DENIED, "the payload is another tenant's", param="tenant")
    if reference.event != kind.__name__:
        return HeadraceError(Reason.INVALID_REQUEST, f"`event` must be {kind.__name__}", param="event")
    ids = isinstance(outline := outline_of(reference), kind) and _ids(outline) is not None
    bytes_max = (TOKEN_IDS_MAX * TOKEN_ID_BYTES if ids else REQUEST_MAX_BYTES) + ENVELOPE_BYTES
    if reference.size_bytes > bytes_max:
        text = f"the payload has {reference.size_bytes} bytes; at most {bytes_max} are taken"
        return HeadraceError(Reason.PAYLOAD_TOO_LARGE, text, param="size_bytes")
    try:
        key_of(reference)
    except Undecodable as error:
        return HeadraceError(Reason.INVALID_REQUEST, error.message, param=error.param)
    return None


_CODEC = Codec()


def is_reference(value: bytes | None) -> bool:
    """Whether a record holds a reference, as far as can be told without decoding it: one that this version wrote in Avro."""
    return value is not None and value[:HEADER_BYTES] == _HEAD


_HEAD = MARKER + bytes.fromhex(published(PayloadStored).fingerprint)


def outline_of(reference: PayloadStored, codec: Codec = _CODEC) -> Stored | None:
    """What a reference tells of its event, or None if it tells nothing that can be read, or of another event."""
    try:
        return _outline(reference, codec)
    except Undecodable:
        return None


def _outline(reference: PayloadStored, codec: Codec) -> Stored | None:
    if reference.outline is None:
        return None
    event = codec.decode(reference.outline)
    if not isinstance(event, Stored) or not _fits(reference, event):
        raise Undecodable("`outline` tells of another event", param="outline")
    return event


def whole(reference: PayloadStored, content: bytes, codec: Codec) -> Stored:
    """The event whose object holds `content`. Raises `Undecodable` if it isn't the one that the reference tells of; `UnknownSchema`."""
    outline = _outline(reference, codec)
    if outline is not None and _ids(outline) is not None:
        assert isinstance(outline, InferenceRequested | InferenceScheduled)
        if content[:REQUEST_ID_CHARS] != reference.request_id.encode():
            raise Undecodable("the object holds another request's token ids")
        return replace(outline, prompt_token_ids=tuple(_unpacked(content[REQUEST_ID_CHARS:])))
    event = codec.decode(content)
    if not isinstance(event, Stored) or not _fits(reference, event):
        raise Undecodable("the object holds another event than the record says")
    return event


def _fits(reference: PayloadStored, event: Stored) -> bool:
    told = reference.event, reference.request_id, reference.tenant
    return told == (type(event).__name__, event.request_id, getattr(event, "tenant", reference.tenant))


def _unpacked(content: bytes) -> Iterator[int]:
    """A step at a time: in a thread, others get their turn between two."""
    if len(content) % TOKEN_ID_BYTES:
        raise Undecodable("the object's token ids are cut")
    ids = array("I", content)
    if sys.byteorder == "big":
        ids.byteswap()
    for start in range(0, len(ids), IDS_A_STEP):
        yield from ids[start : start + IDS_A_STEP]


def stand_in(lost: PayloadUnreadable) -> InferenceFailed | InferenceAnswered | None:
    """What every reader takes for an event of a stream that it can't read: the failure of its attempt, an answer without content; else None."""
    match lost.outline:
        case TokensGenerated() as event:
            return InferenceFailed(
                event.request_id, lost.reference.tenant, "", "", "", lost.reason.value, lost.message, event.attempt
            )
        case InferenceCompleted() as event:
            return InferenceFailed(
                event.request_id,
                event.tenant,
                event.model,
                event.version,
                event.tier,
                lost.reason.value,
                lost.message,
                event.attempt,
            )
        case InferenceAnswered() as event:
            return replace(event, error_reason=lost.reason.value, error_message=lost.message)
        case _:
            return None
