"""Ids of server-sent events: each holds the whole state of its stream right after it, so any bridge goes on from it at once.

`<request id>:<partition>:<offset>:<state>:<mac>`, in characters that URLs and headers take. Callers treat it as opaque. `mac` is a
truncated HMAC-SHA256, by a key derived from the grants' secret, over the tenant and all the rest. So an id that another tenant got, or
that somebody made up, is told from a good one without looking anything up.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

from decisions.stream import COMPLETED, Closed, StreamState
from schemas.errors import HeadraceError
from schemas.events import Attempt, Reply, Usage
from schemas.ids import is_request_id
from schemas.reasons import Reason
from schemas.topics import TOKENS, tenant_tokens_topic

PARAM = "last_event_id"
ID_CHARS_MAX = 8_192
MAC_BYTES = 12
NAMES_MAX = 1_024
"""Names of models and versions that are kept as ids have them."""
AVRO, JSON = "avro", "json"
_PURPOSE = b"headrace event ids, form 1"
_COMPLETIONS, _USAGE, _STARTED, _DIRECT, _JSON, _ANSWERED, _RELEASED = 1, 2, 4, 8, 16, 32, 64


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
    released: bool = False

    def state(self, tenant: str) -> StreamState:
        """The fold's state here. How often the request failed is not known; nobody who reads an answer asks for that."""
        closed = None if self.usage is None else Closed(COMPLETED)
        return StreamState(self.attempt, self.started, self.accepted, closed, tenant=tenant, released=self.released)


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
    """Fields parted by `~`, numbers by `.`."""
    flags = (
        _COMPLETIONS * mark.shape.completions
        | _USAGE * mark.shape.include_usage
        | _STARTED * mark.started
        | _DIRECT * (mark.reply.topic != TOKENS)
        | _JSON * (mark.reply.encoding == JSON)
        | _ANSWERED * mark.answered
        | _RELEASED * mark.released
    )
    attempt, usage = mark.attempt, mark.usage
    fields = (
        str(flags),
        _text(mark.shape.model),
        _text(mark.version),
        "" if attempt is None else f"{attempt.generation}.{attempt.counter}",
        _numbers(mark.accepted),
        _numbers(mark.chars),
        _numbers(mark.text_offsets),
        "" if usage is None else _numbers((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)),
    )
    return "~".join(fields)


def _mark(request_id: str, partition: str, offset: str, state: str, tenant: str) -> Mark:
    """What was signed was written by `_state`, in this form: the key is for no other."""
    first, model, version, attempt, *counts = state.split("~")
    flags = int(first)
    accepted, chars, text_offsets, usage = (tuple(map(int, field.split("."))) if field else () for field in counts)
    topic = tenant_tokens_topic(tenant) if flags & _DIRECT else TOKENS
    return Mark(
        request_id=request_id,
        reply=Reply(topic, int(partition), JSON if flags & _JSON else AVRO),
        offset=int(offset),
        shape=Shape(bool(flags & _COMPLETIONS), bool(flags & _USAGE), unquote(model)),
        version=unquote(version),
        attempt=Attempt(*map(int, attempt.split("."))) if attempt else None,
        started=bool(flags & _STARTED),
        released=bool(flags & _RELEASED),
        accepted=accepted,
        chars=chars,
        text_offsets=text_offsets,
        usage=Usage(*usage) if usage else None,
        answered=bool(flags & _ANSWERED),
    )


@lru_cache(NAMES_MAX)
def _text(text: str) -> str:
    return quote(text, safe="").replace("~", "%7E")


def _numbers(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))
