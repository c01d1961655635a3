"""Ids of server-sent events: each holds the whole state of its stream right after it, so any bridge goes on from it at once.

`<request id>:<partition>:<offset>:<state>:<mac>`, in characters that URLs and headers take. Callers treat it as opaque. `state` is Avro
in base64url; `mac` is a truncated HMAC-SHA256, by a key derived from the grants' secret, over the tenant and all the rest. So an id that
another tenant got, or that somebody made up, is told from a good one without looking anything up.
"""

from __future__ import annotations

import base64
import hmac
import io
from dataclasses import dataclass
from typing import Any, cast

import fastavro

from decisions.stream import COMPLETED, Closed, StreamState
from schemas.errors import HeadraceError
from schemas.events import Attempt, Reply, Usage
from schemas.ids import is_request_id
from schemas.reasons import Reason
from schemas.topics import TOKENS, tenant_tokens_topic

PARAM = "last_event_id"
ID_CHARS_MAX = 8_192
MAC_BYTES = 12
AVRO, JSON = "avro", "json"
_PURPOSE = b"headrace event ids, form 1"
_COMPLETIONS, _USAGE, _STARTED, _DIRECT, _JSON, _ANSWERED = 1, 2, 4, 8, 16, 32

_LONGS = {"type": "array", "items": "long"}
_FIELDS = {
    "flags": "long",
    "model": "string",
    "version": "string",
    "attempt": _LONGS,
    "accepted": _LONGS,
    "chars": _LONGS,
    "text_offsets": _LONGS,
    "usage": _LONGS,
}
_SCHEMA: Any = fastavro.parse_schema(
    {"type": "record", "name": "Mark", "fields": [{"name": name, "type": kind} for name, kind in _FIELDS.items()]}, {}
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a call's chunks look: as completions or as a chat, with the usage at the end or not, and the model as the caller named it."""

    completions: bool
    include_usage: bool
    model: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stream.

    Attributes:
        reply: where the answer goes: to `tokens`, or to its tenant's own topic.
        offset: of the last record folded; what follows it is what follows this place.
        accepted, chars, text_offsets: for each choice, the tokens accepted, the characters shown, and those of all tokens with log-probabilities.
        usage: set if the answer is complete here.
        answered: whether this place is in `answers`, since the records had gone from `tokens`.
    """

    request_id: str
    reply: Reply
    offset: int
    shape: Shape
    version: str = ""
    attempt: Attempt | None = None
    started: bool = False
    accepted: tuple[int, ...] = ()
    chars: tuple[int, ...] = ()
    text_offsets: tuple[int, ...] = ()
    usage: Usage | None = None
    answered: bool = False

    def state(self, tenant: str) -> StreamState:
        """The fold's state here. How often the request failed is not known; nobody who reads an answer asks for that."""
        closed = None if self.usage is None else Closed(COMPLETED)
        return StreamState(self.attempt, self.started, self.accepted, closed, tenant=tenant)


class EventIds:
    """Writes and reads ids. Processes that share the grants' secret read each other's."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, _PURPOSE, "sha256")

    def write(self, mark: Mark, tenant: str) -> str:
        """The id of a place in a tenant's stream."""
        body = f"{mark.request_id}:{mark.reply.partition}:{mark.offset}:{_state(mark)}"
        return f"{body}:{self._mac(body, tenant)}"

    def read(self, text: str, tenant: str) -> Mark:
        """The place that an id names. Raises HeadraceError: invalid_request if it is no id; not_found if it isn't this tenant's."""
        parts = text.split(":") if len(text) <= ID_CHARS_MAX and text.isascii() else []
        if len(parts) != 5 or not is_request_id(parts[0]):
            raise HeadraceError(Reason.INVALID_REQUEST, "this is not the id of an event of a stream", param=PARAM)
        body, _, mac = text.rpartition(":")
        if not hmac.compare_digest(mac, self._mac(body, tenant)):
            raise HeadraceError(Reason.NOT_FOUND, "there is no stream with an event of this id", param=PARAM)
        request_id, partition, offset, state = parts[:4]
        return _mark(request_id, partition, offset, state, tenant)

    def _mac(self, body: str, tenant: str) -> str:
        found = hmac.digest(self._key, f"{tenant}\0{body}".encode(), "sha256")
        return base64.urlsafe_b64encode(found[:MAC_BYTES]).decode()


def _state(mark: Mark) -> str:
    flags = (
        _COMPLETIONS * mark.shape.completions
        | _USAGE * mark.shape.include_usage
        | _STARTED * mark.started
        | _DIRECT * (mark.reply.topic != TOKENS)
        | _JSON * (mark.reply.encoding == JSON)
        | _ANSWERED * mark.answered
    )
    attempt, usage = mark.attempt, mark.usage
    out = io.BytesIO()
    fields = {
        "flags": flags,
        "model": mark.shape.model,
        "version": mark.version,
        "attempt": () if attempt is None else (attempt.generation, attempt.counter),
        "accepted": mark.accepted,
        "chars": mark.chars,
        "text_offsets": mark.text_offsets,
        "usage": () if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
    }
    fastavro.schemaless_writer(out, _SCHEMA, fields, disable_tuple_notation=True)
    return base64.urlsafe_b64encode(out.getvalue()).rstrip(b"=").decode()


def _mark(request_id: str, partition: str, offset: str, state: str, tenant: str) -> Mark:
    """What was signed was written by `_state`, in this form: the key is for no other."""
    raw = base64.urlsafe_b64decode(state + "=" * (-len(state) % 4))
    fields = cast(dict[str, Any], fastavro.schemaless_reader(io.BytesIO(raw), _SCHEMA, None))
    flags = fields["flags"]
    topic = tenant_tokens_topic(tenant) if flags & _DIRECT else TOKENS
    return Mark(
        request_id=request_id,
        reply=Reply(topic, int(partition), JSON if flags & _JSON else AVRO),
        offset=int(offset),
        shape=Shape(bool(flags & _COMPLETIONS), bool(flags & _USAGE), fields["model"]),
        version=fields["version"],
        attempt=Attempt(*fields["attempt"]) if fields["attempt"] else None,
        started=bool(flags & _STARTED),
        accepted=tuple(fields["accepted"]),
        chars=tuple(fields["chars"]),
        text_offsets=tuple(fields["text_offsets"]),
        usage=Usage(*fields["usage"]) if fields["usage"] else None,
        answered=bool(flags & _ANSWERED),
    )
