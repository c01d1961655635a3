"""Events to bytes and back.

Avro single-object encoding (Avro 1.12 specification, "Single-object encoding"): `C3 01`, the schema's CRC-64-AVRO fingerprint in eight
little-endian bytes, then the body. A value that starts with `{` is read as JSON with a member `type` that names the event. The reader
resolves the writer's schema by its fingerprint, so old and new processes mix.
"""

from __future__ import annotations

import base64
import io
import json
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, cast

import fastavro
import fastavro.schema

from schemas.avro_code import ARRAY_END, MISFITS, long_form, reading, writing
from schemas.avro_form import NAMESPACE, checker, fields, reader, schema_of, writer
from schemas.errors import HeadraceError, InvalidField, Undecodable, UnknownSchema
from schemas.events import EVENT_TYPES, Event, SchemaPublished
from schemas.reasons import Reason

MARKER = b"\xc3\x01"
HEADER_BYTES = 10
Schema = dict[str, Any]


def fingerprint(schema: Schema) -> str:
    """The CRC-64-AVRO fingerprint of a schema's parsing canonical form: 16 hex digits, in the order of the wire."""
    canonical = fastavro.schema.to_parsing_canonical_form(cast(Any, schema))
    return fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")


class _Type:
    """What is known of one event type: its own schema, and conversions."""

    def __init__(self, cls: type[Event]) -> None:
        self.cls = cls
        self.schema = cast(Schema, schema_of(cls))
        # with fastavro's mark in it (`_write_hint`), or it would be parsed again for each record
        self.parsed = fastavro.parse_schema(cast(Any, self.schema), {})
        self.fingerprint = fingerprint(self.schema)
        self.header = MARKER + bytes.fromhex(self.fingerprint)
        self.to_dict = writer(cls)

    @cached_property
    def write(self) -> Callable[[Event], bytes]:
        """Made when it is first needed: a process writes few types."""
        return writing(self.cls, self.header)

    @cached_property
    def read(self) -> Callable[[bytes, int], Event]:
        """The same."""
        return reading(self.cls)


_TYPES: dict[type[Any], _Type] = {cls: _Type(cls) for cls in EVENT_TYPES}
_BY_NAME = {t.cls.__name__: t for t in _TYPES.values()}


def own_schemas() -> dict[str, Schema]:
    """The schemas that this version writes, by event name."""
    return {t.cls.__name__: t.schema for t in _TYPES.values()}


def published(cls: type[Event]) -> SchemaPublished:
    """The event that makes this type's schema known to every reader."""
    t = _TYPES[cls]
    return SchemaPublished(t.fingerprint, cls.__name__, json.dumps(t.schema, sort_keys=True))


def encode(event: Event) -> bytes:
    """An event in single-object encoding; `SchemaPublished`, which no reader could resolve, as JSON.

    Raises HeadraceError (invalid_request) if a value doesn't fit its Avro type: an unpaired surrogate, an integer beyond 64 bits.
    """
    if isinstance(event, SchemaPublished):
        return encode_json(event)
    t = _TYPES[type(event)]
    try:
        return t.write(event)
    except MISFITS:
        return _encode_generic(t, event)


class Growing:
    """`encode` of an event whose last field, an array, gets its items little by little: one of thousands so holds nobody up for long."""

    def __init__(self, event: Event) -> None:
        """`event` has no items there."""
        self._event = event
        self._last, self._write = _last_items(cast(Any, type(event)))
        self._items: list[Any] = []
        self._bodies: list[bytes] = []

    def add(self, items: Sequence[Any]) -> None:
        """More items, after those there are."""
        self._items += items
        with suppress(*MISFITS):  # then `value` goes the generic way
            self._bodies += map(self._write, items)

    def value(self) -> bytes:
        """The event with all its items. Raises as `encode`."""
        try:
            if len(self._bodies) == len(self._items):
                start = _TYPES[type(self._event)].write(self._event)[: -len(ARRAY_END)]
                count = [long_form(len(self._items))] if self._items else []
                return b"".join([start, *count, *self._bodies, ARRAY_END])
        except MISFITS:
            pass
        return encode(replace(self._event, **cast(Any, {self._last: tuple(self._items)})))


@cache
def _last_items(cls: type[Any]) -> tuple[str, Callable[[Any], bytes]]:
    """The name of a type's last field, an array of records, and what writes one of them."""
    last, annotation = fields(cls)[-1]
    return last.name, writing(typing.get_args(annotation)[0], b"")


def _encode_generic(t: _Type, event: Event) -> bytes:
    out = io.BytesIO()
    out.write(t.header)
    try:
        fastavro.schemaless_writer(out, t.parsed, t.to_dict(event), disable_tuple_notation=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise HeadraceError(
            Reason.INVALID_REQUEST, f"{type(event).__name__} can't be written: {_where(t, event, error)}"
        ) from error
    return out.getvalue()


def _where(t: _Type, event: Event, error: Exception) -> str:
    """Names the field at fault by the strict JSON check, since fastavro doesn't."""
    try:
        plain = json.loads(encode_json(event))
        del plain["type"]
        checker(t.cls)(plain, "")
    except HeadraceError as found:
        return found.message
    except (ValueError, TypeError) as unwritable:
        return str(unwritable)
    return type(error).__name__


def _json_default(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def to_json(event: Event) -> dict[str, Any]:
    """An event as a dictionary with `type` first; bytes stay bytes."""
    t = _TYPES[type(event)]
    return {"type": t.cls.__name__, **t.to_dict(event)}


def encode_json(event: Event) -> bytes:
    """An event as one line of JSON; bytes become base64."""
    return json.dumps(to_json(event), default=_json_default, separators=(",", ":")).encode()


def decode_json(value: bytes) -> Event:
    """Reads a JSON record, trusting nothing. Raises `Undecodable`, or `InvalidField` naming the field at fault."""
    try:
        parsed = json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"the record starts with '{{' but is not JSON: {error}") from None
    name = parsed.pop("type", None)
    t = _BY_NAME.get(name) if isinstance(name, str) else None
    if t is None:
        raise InvalidField(f"`type` must name an event: one of {', '.join(sorted(_BY_NAME))}", param="type")
    return cast(Event, checker(t.cls)(parsed, ""))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class Codec:
    """Decodes records of any known writer.

    It knows its own schemas from the start; `learn` adds a writer's. Not thread-safe while learning.
    """

    def __init__(self) -> None:
        self._decoders: dict[bytes, Callable[[io.BytesIO], Event]] = {}
        self._own = {bytes.fromhex(t.fingerprint): t for t in _TYPES.values()}
        for t in _TYPES.values():
            self._add(t.fingerprint, t, None)

    def _add(self, mark: str, t: _Type, writer_schema: Any) -> None:
        read, own = reader(t.cls), t.parsed

        def decode(body: io.BytesIO) -> Event:
            plain = fastavro.schemaless_reader(
                body, own if writer_schema is None else writer_schema, None if writer_schema is None else own
            )
            return cast(Event, read(cast(dict[str, Any], plain)))

        self._decoders[bytes.fromhex(mark)] = decode

    def learn(self, event: SchemaPublished) -> None:
        """Makes a writer's schema known. Raises `Undecodable` if it is no schema, or not of an event that this version has."""
        try:
            schema = json.loads(event.schema)
            mark = fingerprint(schema)
            t = _BY_NAME[schema["name"]]
            if schema.get("namespace") != NAMESPACE:
                raise ValueError("foreign namespace")
            parsed = fastavro.parse_schema(schema, {})
        except Exception as error:  # a record may hold anything, and those after it count
            raise Undecodable(f"the published schema {event.name!r} can't be used: {type(error).__name__}") from error
        if bytes.fromhex(mark) not in self._decoders:
            self._add(mark, t, parsed)

    def knows(self, mark: str) -> bool:
        """Whether records with this fingerprint (hex) can be decoded."""
        return bytes.fromhex(mark) in self._decoders

    def decode(self, value: bytes | None) -> Event:
        """The event in a record's value. Raises `Undecodable`; `UnknownSchema` if the topic `schemas` may help."""
        if not value:
            raise Undecodable("the record has no value")
        if value[:1] == b"{":
            return decode_json(value)
        if value[:2] != MARKER or len(value) < HEADER_BYTES:
            raise Undecodable("the record is neither Avro single-object encoding (C3 01 …) nor JSON ({…)")
        mark = value[2:HEADER_BYTES]
        if (own := self._own.get(mark)) is not None:
            try:
                return own.read(value, HEADER_BYTES)
            except MISFITS:
                pass  # it goes the generic way, which knows what is wrong
        decode = self._decoders.get(mark)
        if decode is None:
            raise UnknownSchema(mark.hex())
        body = io.BytesIO(value)
        body.seek(HEADER_BYTES)
        try:
            event = decode(body)
        except HeadraceError:
            raise
        except Exception as error:  # fastavro raises many kinds for bytes that are cut or wrong
            raise Undecodable(f"the Avro body is cut or wrong: {type(error).__name__}") from error
        if body.tell() != len(value):
            raise Undecodable(f"the Avro body ends {len(value) - body.tell()} bytes before the record does")
        return event
