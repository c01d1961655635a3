"""Writes and reads a dataclass's Avro body by code made for its class, once: a tenth of what a generic writer costs.

It serves only what fits exactly: values of the types that the annotations name, bytes that this version's own schema wrote. Anything else
raises one of `MISFITS`, and whoever calls goes the generic way, which knows what is wrong. The bytes are those that fastavro writes (Avro 1.12
specification, "Binary Encoding").
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from collections.abc import Callable, Iterator
from typing import Any

from schemas.avro_form import default, fields, optional

MISFITS = (ValueError, TypeError, AttributeError, LookupError, OverflowError, struct.error)
LONGS_KEPT = 1 << 18
"""Forms of so many integers are kept: lengths, counts, and the token ids of any vocabulary."""
VARINTS_KEPT = 1 << 14
WORD_CHARS_MAX, WORDS_KEPT = 32, 1 << 12
"""A request's id is longer, and doesn't recur."""
LONG_BYTES_MAX = 10
INT64_MAX = (1 << 63) - 1
UINT64_MAX = (1 << 64) - 1
ARRAY_END = b"\x00"
"""What follows an array's entries; all that an empty one is."""


class _Varints(dict[int, bytes]):
    """Whole numbers as they are written: seven bits a byte, the lowest first. What was asked for is kept, so many at most."""

    def __missing__(self, rest: int) -> bytes:
        out, number = [], rest
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
        if len(self) >= VARINTS_KEPT:
            self.clear()
        self[number] = form = bytes(out)
        return form


_SEVEN_BITS = [bytes([number | 0x80]) for number in range(0x80)]
"""A byte that others follow."""


class _Longs(dict[int, bytes]):
    """Integers as they are written: zigzag, then as `_Varints`."""

    def __init__(self) -> None:
        super().__init__()
        self._high = _Varints()

    def __missing__(self, value: int) -> bytes:
        if not -INT64_MAX - 1 <= value <= INT64_MAX:
            raise OverflowError("doesn't fit in 64 bits")
        rest = value << 1 if value >= 0 else (-value << 1) - 1
        if rest > 0x3FFF:
            # As times in milliseconds are, of which each event has some: their high bits are those of many.
            form = _SEVEN_BITS[rest & 0x7F] + _SEVEN_BITS[rest >> 7 & 0x7F] + self._high[rest >> 14]
        else:
            form = self._high[rest]
        if 0 <= value < LONGS_KEPT:
            self[value] = form
        return form


class _Words(dict[str, bytes]):
    """Short strings as they are written. Most recur: names of topics, models, checks and what these found. So many are kept."""

    def __missing__(self, word: str) -> bytes:
        encoded = word.encode()
        if len(self) >= WORDS_KEPT:
            self.clear()
        self[word] = form = _LONGS[len(encoded)] + encoded
        return form


def _more(body: bytes, at: int, first: int) -> tuple[int, int]:
    """The rest of an integer of several bytes, still zigzag, and where it ends."""
    found = first & 0x7F
    for shift in range(7, 7 * LONG_BYTES_MAX, 7):
        byte = body[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            break
    if byte > 0x7F or found > UINT64_MAX:
        raise ValueError("an integer has more than 64 bits")
    return found, at


def _length(body: bytes, at: int) -> tuple[int, int]:
    """A length, or a count, and where it ends. One that is negative, which a block with a size begins with, goes the generic way."""
    value = body[at]
    found, at = _more(body, at + 1, value) if value > 0x7F else (value, at + 1)
    if found & 1:
        raise ValueError("a length is negative")
    return found >> 1, at


def _longs(body: bytes, at: int, count: int) -> tuple[list[int], int]:
    """So many integers one after the other, and where they end: two bytes hold most token ids."""
    found = []
    for _ in range(count):
        value = body[at]
        at += 1
        if value > 0x7F:
            second = body[at]
            if second > 0x7F:
                value, at = _more(body, at, value)
            else:
                value += (second << 7) - 0x80
                at += 1
        found.append((value >> 1) ^ -(value & 1))
    return found, at


class _Source:
    """Lines of a function under way, the names that it needs, and fresh names for its variables."""

    def __init__(self, **known: Any) -> None:
        self.lines: list[str] = []
        self.known = known
        self._used = 0

    def add(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]

    def fresh(self) -> str:
        self._used += 1
        return f"v{self._used}"

    def made(self, name: str) -> Any:
        scope = dict(self.known)
        exec("\n".join(self.lines), scope)  # noqa: S102  # the text is made of annotations alone, as `dataclasses` does it
        return scope[name]


def _parts(cls: type[Any]) -> Iterator[tuple[str, Any, str]]:
    """A record's fields: name, annotation, and of a nullable one the place of null among the two branches."""
    for field, annotation in fields(cls):
        given = default(field)
        yield field.name, annotation, "1" if given is not dataclasses.MISSING and given is not None else "0"


# --- writing ---------------------------------------------------------------------------------------------------------


def writing(cls: type[Any], header: bytes) -> Callable[[Any], bytes]:
    """A function from an instance to `header` and its Avro body. Raises `MISFITS`."""
    source = _Source(
        longs=_LONGS, words=_Words(), many=_LONGS.__getitem__, double=struct.Struct("<d").pack, header=header
    )
    source.add(0, "def write(value):", "    out = bytearray(header)")
    _write_record(source, 1, cls, "value")
    source.add(1, "return bytes(out)")
    return typing.cast(Callable[[Any], bytes], source.made("write"))


def long_form(value: int) -> bytes:
    """An integer as it is written. Raises `MISFITS`."""
    return _LONGS[value]


def _write_record(source: _Source, depth: int, cls: type[Any], of: str) -> None:
    for name, annotation, null in _parts(cls):
        _write(source, depth, annotation, f"{of}.{name}", null)


def _write(source: _Source, depth: int, annotation: Any, what: str, null: str = "0") -> None:
    if annotation is int:
        return source.add(depth, f"out += longs[{what}]")
    if annotation is float:
        return source.add(depth, f"out += double({what})")
    if annotation is bool:
        return source.add(depth, f"out += b'\\x01' if {what} else b'\\x00'")
    name = source.fresh()
    source.add(depth, f"{name} = {what}")
    if annotation is str:
        source.add(depth, f"if len({name}) <= {WORD_CHARS_MAX}:", f"    out += words[{name}]")
        source.add(
            depth, "else:", f"    {name} = {name}.encode()", f"    out += longs[len({name})]", f"    out += {name}"
        )
        return None
    if annotation is bytes:
        return source.add(depth, f"out += longs[len({name})]", f"out += {name}")
    if (inner := optional(annotation)) is not None:
        here, there = (b"\x00", b"\x02") if null == "0" else (b"\x02", b"\x00")
        source.add(depth, f"if {name} is None:", f"    out += {here!r}", "else:", f"    out += {there!r}")
        return _write(source, depth + 1, inner, name)
    if typing.get_origin(annotation) in (tuple, dict):
        return _write_items(source, depth, annotation, name)
    return _write_record(source, depth, annotation, name)


def _write_items(source: _Source, depth: int, annotation: Any, name: str) -> None:
    """An array, or a map: their entries in one block, and an empty one."""
    source.add(depth, f"if {name}:", f"    out += longs[len({name})]")
    item = source.fresh()
    if typing.get_origin(annotation) is dict:
        key = source.fresh()
        source.add(depth + 1, f"for {key}, {item} in {name}.items():")
        _write(source, depth + 2, str, key)
        _write(source, depth + 2, typing.get_args(annotation)[1], item)
    elif (of := typing.get_args(annotation)[0]) is int:
        source.add(depth + 1, f"out += b''.join(map(many, {name}))")
    else:
        source.add(depth + 1, f"for {item} in {name}:")
        _write(source, depth + 2, of, item)
    source.add(depth, f"out += {ARRAY_END!r}")


# --- reading ---------------------------------------------------------------------------------------------------------


def reading(cls: type[Any]) -> Callable[[bytes, int], Any]:
    """A function (bytes, where the body begins in them) -> instance; the body ends with the bytes. Raises `MISFITS`."""
    source = _Source(more=_more, length=_length, longs=_longs, double=struct.Struct("<d").unpack_from)
    source.add(0, "def read(body, at):")
    made = _read_record(source, 1, cls)
    source.add(1, "if at != len(body):", "    raise ValueError('the body ends elsewhere')", f"return {made}")
    return typing.cast(Callable[[bytes, int], Any], source.made("read"))


def _read_record(source: _Source, depth: int, cls: type[Any]) -> str:
    """Reads the fields, and returns the expression that makes the record of them."""
    made = [_read(source, depth, annotation, null) for _, annotation, null in _parts(cls)]
    source.known[cls.__name__] = cls
    return f"{cls.__name__}({', '.join(made)})"


def _read(source: _Source, depth: int, annotation: Any, null: str = "0") -> str:
    """Reads a value, and returns the expression that it is."""
    name = source.fresh()
    if annotation is int:
        source.add(
            depth, f"{name} = body[at]", "at += 1", f"if {name} > 127:", f"    {name}, at = more(body, at, {name})"
        )
        return f"({name} >> 1) ^ -({name} & 1)"
    if annotation is float:
        source.add(depth, f"({name},) = double(body, at)", "at += 8")
        return name
    if annotation is bool:
        source.add(depth, f"{name} = body[at]", "at += 1", f"if {name} > 1:", "    raise ValueError('neither of two')")
        return f"{name} == 1"
    if annotation in (str, bytes):
        # Most are short, and their length is one even byte. Bytes that are missing at the end are noticed there: places only grow.
        source.add(
            depth, f"{name} = body[at]", f"if {name} & 129:", f"    {name}, at = length(body, at)", f"    {name} += at"
        )
        source.add(depth, "else:", "    at += 1", f"    {name} = at + ({name} >> 1)")
        decoded = ".decode()" if annotation is str else ""
        source.add(depth, f"at, {name} = {name}, body[at:{name}]{decoded}")
        return name
    if (inner := optional(annotation)) is not None:
        here, there = ("0", "2") if null == "0" else ("2", "0")
        source.add(depth, f"{name} = body[at]", "at += 1", f"if {name} == {there}:")
        source.add(depth + 1, f"{name} = {_read(source, depth + 1, inner)}")
        source.add(depth, f"elif {name} == {here}:", f"    {name} = None")
        source.add(depth, "else:", "    raise ValueError('no such branch')")
        return name
    if typing.get_origin(annotation) in (tuple, dict):
        return _read_items(source, depth, annotation)
    source.add(depth, f"{name} = {_read_record(source, depth, annotation)}")
    return name


def _read_items(source: _Source, depth: int, annotation: Any) -> str:
    """An array, or a map, of any number of blocks."""
    found, count, put = source.fresh(), source.fresh(), source.fresh()
    is_map = typing.get_origin(annotation) is dict
    source.add(depth, f"{found} = {'{}' if is_map else '[]'}")
    source.add(depth, "while True:")
    source.add(depth + 1, f"{count}, at = length(body, at)")
    source.add(depth + 1, f"if not {count}:", "    break")
    if not is_map and typing.get_args(annotation)[0] is int:
        source.add(depth + 1, f"{put}, at = longs(body, at, {count})", f"{found} += {put}")
        return f"tuple({found})"
    source.add(depth + 1, f"for _ in range({count}):")
    if is_map:
        key = _read(source, depth + 2, str)
        source.add(depth + 2, f"{put} = {key}")
        source.add(depth + 2, f"{found}[{put}] = {_read(source, depth + 2, typing.get_args(annotation)[1])}")
        return found
    source.add(depth + 2, f"{found}.append({_read(source, depth + 2, typing.get_args(annotation)[0])})")
    return f"tuple({found})"


_LONGS = _Longs()
