"""What was asked before: by its idempotency key, or, of who writes to the log himself, by its request id.

Only what was let in is remembered, as its admission tells. Of several requests with one key the last one asked stands: an earlier one had been
given up when it was let in. So what is known doesn't depend on the order in which records are heard, nor on hearing one twice, and whoever has
read the same records knows the same. A request that failed for a reason which a retry can help, was cancelled, or was
asked with an API key that is revoked, frees its key. An id is never freed: it has one stream, and that is closed.

`KeyIndex` is the bookkeeping of one partition. It reads no clock and does no I/O.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, replace
from enum import StrEnum
from typing import Any

from schemas.events import InferenceAdmitted, InferenceJoined, InferenceRequested, Position, RequestKeyed
from schemas.parts import Keyed, Reply
from schemas.reasons import Reason, lookup
from schemas.topics import KEY_KEPT_MS, TOKENS

KEYS_MAX = 200_000
"""Keys of one partition that are remembered; of more, the oldest is forgotten."""
FREED_MAX = 50_000
"""Requests of one partition of which it is remembered that they failed, should it be told again that they were let in."""
_FREEING = (Reason.CANCELLED, Reason.INVALID_API_KEY)
"""Reasons that a retry can't help and that free a key all the same: they are no word on what was asked, and another may ask it."""
NOT_COUNTED = frozenset({"request_id", "idempotency_key", "stream", "timeout_ms", "cache_control", "door"})
"""What may differ between a request and its repeat: who it is, how and where its answer is shown, and how long is waited for it."""

Key = tuple[str, str]
"""Tenant, and the SHA-256 of its key."""


# --- what a request is known by --------------------------------------------------------------------------------------


def keyed(request: InferenceRequested, reply: Reply) -> Keyed | None:
    """By what a request is known when it is asked again; None if it isn't: a front door makes a new id for each call.

    `reply` is the grant's: whoever reads a topic of its own writes to the log himself, and makes his ids himself.
    """
    if request.idempotency_key:
        return Keyed(_digest(f"key {request.idempotency_key}"), fingerprint(request))
    return Keyed(_id_key(request.request_id), fingerprint(request)) if reply.topic != TOKENS else None


def fingerprint(request: InferenceRequested) -> str:
    """The SHA-256 of all that a request asks: every field but `NOT_COUNTED`, so that a new one counts by itself.

    What holds its default isn't counted, or a version that knows a field more would find that the same request differs.
    """
    asked = {name: value for name, value in _plain(request).items() if name not in NOT_COUNTED}
    return _digest(json.dumps(asked, sort_keys=True, separators=(",", ":")))


def _id_key(request_id: str) -> str:
    return _digest(f"id {request_id}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """A value as JSON has it, where what is equal looks equal."""
    if dataclasses.is_dataclass(value):
        found = ((item, getattr(value, item.name)) for item in dataclasses.fields(value))
        return {item.name: _plain(held) for item, held in found if held != _default(item)}
    if isinstance(value, dict):
        return {name: _plain(held) for name, held in value.items()}
    if isinstance(value, tuple):
        return [_plain(held) for held in value]
    if isinstance(value, bytes):
        return value.hex()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


# --- what is known of a partition ------------------------------------------------------------------------------------


class KeyStanding(StrEnum):
    """What a request is to what was asked before under its key."""

    NEW = "new"
    """Nobody has asked."""
    REPEAT = "repeat"
    """The same was asked: that one's stream is the answer."""
    CONFLICT = "conflict"
    """Something else was asked."""


@dataclass(frozen=True, slots=True)
class First:
    """The request that a key stands for, and where and from when on its stream is."""

    request_id: str
    reply: Reply
    model: str
    requested_ms: int
    fingerprint: str


class KeyIndex:
    """See the module. `hear` and `free` may come in any order, and again."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._firsts: OrderedDict[Key, First] = OrderedDict()
        self._keys: dict[Key, Key] = {}
        self._freed: OrderedDict[Key, None] = OrderedDict()
        self._unsaved: dict[Key, RequestKeyed] = {}

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._firsts)

    def firsts(self) -> dict[Key, First]:
        """All that is remembered."""
        return dict(self._firsts)

    def hear(self, record: RequestKeyed) -> None:
        """A request was let in under a key, or has freed it."""
        if record.tier != self._tier:
            return
        request = record.tenant, record.request_id
        if record.free:
            self._unsaved.pop(request, None)
            self._free(request)
            return
        if request in self._freed:
            self._unsaved[request] = replace(record, free=True)
            return
        key, found = (record.tenant, record.keyed.key), _first(record)
        known = self._firsts.get(key)
        if known is not None and _order(known) >= _order(found):
            return
        self._forget(key)
        self._firsts[key] = found
        self._keys[request] = key
        self._make_room(found.requested_ms)

    def admitted(self, event: InferenceAdmitted) -> None:
        """The same, as the request's admission tells it."""
        if (record := remembered(event)) is not None:
            self.hear(record)

    def failed(self, tenant: str, request_id: str, reason: str) -> None:
        """A request ended without its answer. Most reasons free its key: then the next that asks is answered anew."""
        known = lookup(reason)
        if known.retriable or known in _FREEING:
            self.free(tenant, request_id)

    def free(self, tenant: str, request_id: str) -> None:
        """A request's key stands for nothing any more."""
        request = tenant, request_id
        key = self._keys.get(request)
        if key is not None and key[1] == _id_key(request_id):
            return
        if key is not None:
            self._unsaved[request] = _freed(tenant, self._tier, key[1], self._firsts[key])
        self._free(request)

    def _free(self, request: Key) -> None:
        if (key := self._keys.get(request)) is not None:
            self._forget(key)
        self._freed.pop(request, None)
        self._freed[request] = None
        if len(self._freed) > FREED_MAX:
            self._freed.popitem(last=False)

    def _forget(self, key: Key) -> None:
        if (first := self._firsts.pop(key, None)) is not None:
            self._keys.pop((key[0], first.request_id), None)

    def _make_room(self, now_ms: int) -> None:
        """The oldest goes when there are too many; of those whose day is over a few a call, so that none takes long."""
        if len(self._firsts) > KEYS_MAX:
            self._forget(next(iter(self._firsts)))
        for _ in range(2):
            oldest = next(iter(self._firsts.items()), None)
            if oldest is None or now_ms - oldest[1].requested_ms < KEY_KEPT_MS:
                return
            self._forget(oldest[0])

    def standing(self, tenant: str, asked: Keyed, asked_ms: int) -> tuple[KeyStanding, First | None]:
        """What to do with a request of a tenant that was asked at this time, and the first under its key."""
        first = self._firsts.get((tenant, asked.key))
        if first is None or asked_ms - first.requested_ms >= KEY_KEPT_MS:
            return KeyStanding.NEW, None
        return KeyStanding.REPEAT if first.fingerprint == asked.fingerprint else KeyStanding.CONFLICT, first

    def take_unsaved(self) -> list[RequestKeyed]:
        """What was freed, to be written down: `unsaved` gives back what couldn't be."""
        found, self._unsaved = list(self._unsaved.values()), {}
        return found

    def unsaved(self, records: Iterable[RequestKeyed]) -> None:
        """These were not written: they come again."""
        for record in records:
            self._unsaved.setdefault((record.tenant, record.request_id), record)


def _order(first: First) -> tuple[int, str]:
    return first.requested_ms, first.request_id


def _first(record: RequestKeyed) -> First:
    return First(record.request_id, record.reply, record.model, record.requested_ms, record.keyed.fingerprint)


def _freed(tenant: str, tier: str, key: str, first: First) -> RequestKeyed:
    what = Keyed(key, first.fingerprint)
    return RequestKeyed(tenant, tier, what, first.request_id, first.reply, first.model, first.requested_ms, free=True)


# --- what a verdict becomes ------------------------------------------------------------------------------------------


def remembered(event: InferenceAdmitted) -> RequestKeyed | None:
    """The record by which an admission is remembered when `lifecycle` is no longer read from there; None without a key."""
    if event.keyed is None:
        return None
    return RequestKeyed(
        event.tenant, event.tier, event.keyed, event.request_id, event.reply, event.model, event.requested_ms
    )


def joined(
    request: InferenceRequested, tenant: str, tier: str, first: First, requested_ms: int, source: Position
) -> InferenceJoined:
    """The answer to a repeat."""
    return InferenceJoined(
        request_id=request.request_id,
        tenant=tenant,
        model=first.model,
        tier=tier,
        first_request_id=first.request_id,
        first_reply=first.reply,
        first_requested_ms=first.requested_ms,
        requested_ms=requested_ms,
        source=source,
    )


def conflict(request: InferenceRequested) -> tuple[str, str]:
    """What whoever asks something else under a known key is told, and the field at fault."""
    if not request.idempotency_key:
        return "Another request of this tenant has this id; make a new id for what is another request.", "request_id"
    text = "This idempotency key was used for another request. Send that one unchanged to have its answer, or give this one a key of its own."
    return text, "idempotency_key"
