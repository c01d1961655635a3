"""Maps event dataclasses to Avro schemas and to plain dictionaries and back, from their annotations, once per class."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from schemas.errors import InvalidField

NAMESPACE = "headrace"
INT64 = range(-(1 << 63), 1 << 63)
NAME_CHARS_SHOWN = 64
"""So many characters of a name that a writer made up are quoted."""
_PRIMITIVES = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}
Convert = Callable[[Any], Any]
Check = Callable[[Any, str], Any]


def optional(annotation: Any) -> Any | None:
    """X if the annotation is `X | None`, else None."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(inner) == 1 and len(typing.get_args(annotation)) == 2:
            return inner[0]
        raise TypeError(f"only X | None is mapped, not {annotation}")
    return None


def fields(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    """A dataclass's fields, with what their annotations mean."""
    hints = typing.get_type_hints(cls)
    return [(f, hints[f.name]) for f in dataclasses.fields(cls)]


def default(f: dataclasses.Field[Any]) -> Any:
    """The field's default as Avro's JSON, or MISSING."""
    value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    if value is dataclasses.MISSING:
        return value
    if dataclasses.is_dataclass(value):
        return writer(type(value))(value)
    return list(value) if isinstance(value, tuple) else value


def schema_of(cls: type[Any], seen: set[str] | None = None) -> dict[str, Any] | str:
    """The Avro schema of a dataclass; a record met before (`seen`) is named, not repeated."""
    seen = set() if seen is None else seen
    name = f"{NAMESPACE}.{cls.__name__}"
    if name in seen:
        return name
    seen.add(name)
    entries = []
    for f, annotation in fields(cls):
        entry: dict[str, Any] = {"name": f.name, "type": _schema(annotation, seen)}
        if (value := default(f)) is not dataclasses.MISSING:
            if value is not None and isinstance(entry["type"], list):
                entry["type"] = entry["type"][::-1]
            entry["default"] = value
        entries.append(entry)
    doc = " ".join((cls.__doc__ or "").split())
    return {"type": "record", "name": cls.__name__, "namespace": NAMESPACE, "doc": doc, "fields": entries}


def _schema(annotation: Any, seen: set[str]) -> Any:
    if annotation in _PRIMITIVES:
        return _PRIMITIVES[annotation]
    if (inner := optional(annotation)) is not None:
        return ["null", _schema(inner, seen)]
    if typing.get_origin(annotation) is tuple:
        return {"type": "array", "items": _schema(typing.get_args(annotation)[0], seen)}
    if typing.get_origin(annotation) is dict:
        return {"type": "map", "values": _schema(typing.get_args(annotation)[1], seen)}
    return schema_of(annotation, seen)


# --- to and from plain dictionaries (what fastavro takes and gives) ---------------------------------------------------

_WRITERS: dict[type[Any], Convert] = {}
_READERS: dict[type[Any], Convert] = {}
_CHECKERS: dict[type[Any], Check] = {}


def writer(cls: type[Any]) -> Convert:
    """A function from an instance of the dataclass to a dictionary with plain values."""
    if cls not in _WRITERS:
        parts = tuple((f.name, _writer(annotation)) for f, annotation in fields(cls))
        plain = tuple(name for name, convert in parts if convert is None)
        nested = tuple((name, convert) for name, convert in parts if convert is not None)

        def write(value: Any) -> dict[str, Any]:
            out = {name: getattr(value, name) for name in plain}
            for name, convert in nested:
                out[name] = convert(getattr(value, name))
            return out

        _WRITERS[cls] = write
    return _WRITERS[cls]


def _writer(annotation: Any) -> Convert | None:
    """The conversion that values of this type need, or None if they go as they are."""
    if annotation in _PRIMITIVES:
        return None
    if (inner := optional(annotation)) is not None:
        return _apply_optional(_writer(inner))
    if typing.get_origin(annotation) is tuple:
        return _apply_each(_writer(typing.get_args(annotation)[0]), list, unchanged=None)
    if typing.get_origin(annotation) is dict:
        return _apply_values(_writer(typing.get_args(annotation)[1]))
    return writer(annotation)


def _apply_optional(convert: Convert | None) -> Convert | None:
    return None if convert is None else lambda value: None if value is None else convert(value)


def _apply_each(convert: Convert | None, make: Convert, unchanged: Convert | None) -> Convert | None:
    return unchanged if convert is None else lambda value: make([convert(item) for item in value])


def _apply_values(convert: Convert | None) -> Convert | None:
    return None if convert is None else lambda value: {key: convert(item) for key, item in value.items()}


def reader(cls: type[Any]) -> Convert:
    """A function from a dictionary that Avro has already checked to an instance of the dataclass."""
    if cls not in _READERS:
        parts = tuple((f.name, _reader(annotation)) for f, annotation in fields(cls))
        nested = tuple((name, convert) for name, convert in parts if convert is not None)

        def read(value: dict[str, Any]) -> Any:
            for name, convert in nested:
                value[name] = convert(value[name])
            return cls(**value)

        _READERS[cls] = read
    return _READERS[cls]


def _reader(annotation: Any) -> Convert | None:
    if annotation in _PRIMITIVES:
        return None
    if (inner := optional(annotation)) is not None:
        return _apply_optional(_reader(inner))
    if typing.get_origin(annotation) is tuple:
        return _apply_each(_reader(typing.get_args(annotation)[0]), tuple, unchanged=tuple)
    if typing.get_origin(annotation) is dict:
        return _apply_values(_reader(typing.get_args(annotation)[1]))
    return reader(annotation)


# --- from JSON that anybody may have written --------------------------------------------------------------------------


def checker(cls: type[Any]) -> Check:
    """A function (value, path) -> instance that takes nothing on trust. Raises `InvalidField` naming the path at fault."""
    if cls not in _CHECKERS:
        parts = {f.name: (_checker(annotation), _required(f)) for f, annotation in fields(cls)}

        def check(value: Any, path: str) -> Any:
            if not isinstance(value, Mapping):
                raise InvalidField(f"{path or 'the record'} must be a JSON object", param=path or None)
            if unknown := sorted(set(value) - set(parts)):
                name = _join(path, _quoted(unknown[0]))
                raise InvalidField(f"{cls.__name__} has no field {name}; it has {', '.join(parts)}", param=name)
            given = {}
            for name, (convert, required) in parts.items():
                if name in value:
                    given[name] = convert(value[name], _join(path, name))
                elif required:
                    raise InvalidField(f"{_join(path, name)} is required", param=_join(path, name))
            return cls(**given)

        _CHECKERS[cls] = check
    return _CHECKERS[cls]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _quoted(name: str) -> str:
    """A name that a writer made up, fit to be told in an event: short, and text all through."""
    return name[:NAME_CHARS_SHOWN].encode("utf-8", "backslashreplace").decode()


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _checker(annotation: Any) -> Check:
    if annotation in _PRIMITIVES:
        return _PRIMITIVE_CHECKS[annotation]
    if (inner := optional(annotation)) is not None:
        convert = _checker(inner)
        return lambda value, path: None if value is None else convert(value, path)
    if typing.get_origin(annotation) is tuple:
        item_check = _checker(typing.get_args(annotation)[0])

        def check_list(value: Any, path: str) -> Any:
            if not isinstance(value, list):
                raise InvalidField(f"{path} must be a list", param=path)
            return tuple(item_check(item, f"{path}[{i}]") for i, item in enumerate(value))

        return check_list
    if typing.get_origin(annotation) is dict:
        value_check = _checker(typing.get_args(annotation)[1])

        def check_map(value: Any, path: str) -> Any:
            if not isinstance(value, Mapping):
                raise InvalidField(f"{path} must be a JSON object", param=path)
            return {_check_text(key, path): value_check(item, f"{path}.{_quoted(key)}") for key, item in value.items()}

        return check_map
    return checker(annotation)


def _check_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidField(f"{path} must be a string", param=path)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidField(f"{path} holds an unpaired surrogate, which is not text", param=path) from None
    return value


def _check_int(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidField(f"{path} must be an integer", param=path)
    if value not in INT64:
        raise InvalidField(f"{path} doesn't fit in 64 bits", param=path)
    return value


def _check_float(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidField(f"{path} must be a number", param=path)
    try:
        return float(value)
    except OverflowError:
        raise InvalidField(f"{path} is too large for a number", param=path) from None


def _check_bool(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidField(f"{path} must be true or false", param=path)
    return value


def _check_bytes(value: Any, path: str) -> bytes:
    try:
        return base64.b64decode(_check_text(value, path), validate=True)
    except binascii.Error:
        raise InvalidField(f"{path} must be base64", param=path) from None


_PRIMITIVE_CHECKS: dict[type[Any], Check] = {
    str: _check_text,
    int: _check_int,
    float: _check_float,
    bool: _check_bool,
    bytes: _check_bytes,
}
