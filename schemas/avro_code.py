"""Writes and reads a dataclass's Avro body by code made for its class, once: a tenth of what a generic writer costs.

It serves only what fits exactly: values of the types that the annotations name, bytes that this version's own schema wrote. Anything else
raises one of `MISFITS`, and whoever calls goes the generic way, which knows what is wrong. The bytes are those that fastavro writes (Avro 1.12
specification, "Binary Encoding").
"""

from __future__ import annotations

import dataclasses
import operator
import struct
import typing
from collections.abc import Callable, Iterator
from typing import Any

from schemas.avro_form import default, fields, optional

MISFITS = (ValueError, TypeError, AttributeError, LookupError, OverflowError, struct.error)
LONGS_KEPT = 1 << 18
"""Forms of so many integers are kept: lengths, counts, and the token ids of any vocabulary."""
VARINTS_KEPT, TIMES_KEPT = 1 << 14, 1 << 12
"""Larger ones are times and places, which recur a few times within a moment."""
WORD_CHARS_MAX, SENTENCE_BYTES_MAX, WORDS_KEPT = 32, 96, 1 << 12
"""A request's id is longer, and doesn't recur."""
LONG_BYTES_MAX, TIME_BYTES = 10, 6
INT64_MAX = (1 << 63) - 1
UINT64_MAX = (1 << 64) - 1
ARRAY_END = b"\x00"
"""What follows an array's entries; all that an empty one is."""


Key = typing.TypeVar("Key")
Value = typing.TypeVar("Value")


class _Kept(dict[Key, Value]):
    """What was made of something, by that: so many at most, then it begins anew."""

    kept_max = WORDS_KEPT

    def keep(self, key: Key, value: Value) -> Value:
        """The value, which is kept."""
        if len(self) >= self.kept_max:
            self.clear()
        self[key] = value
        return value


class _Varints(_Kept[int, bytes]):
    """Whole numbers as they are written: seven bits a byte, the lowest first. What was asked for is kept."""

    kept_max = VARINTS_KEPT

    def __missing__(self, rest: int) -> bytes:
        out, number = [], rest
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
        return self.keep(number, bytes(out))


_SEVEN_BITS = [bytes([number | 0x80]) for number in range(0x80)]
"""A byte that others follow."""


class _Longs(dict[int, bytes]):
    """Integers as they are written: zigzag, then as `_Varints`."""

    def __init__(self) -> None:
        super().__init__()
        self._high = _Varints()
        self._times: list[int] = []

    def __missing__(self, value: int) -> bytes:
        if not -INT64_MAX - 1 <= value <= INT64_MAX:
            raise OverflowError("doesn't fit in 64 bits")
        rest = value << 1 if value >= 0 else (-value << 1) - 1
        if rest > 0x3FFF:
            # As times in milliseconds are, of which each event has some: their high bits are those of many.
            form = _SEVEN_BITS[rest & 0x7F] + _SEVEN_BITS[rest >> 7 & 0x7F] + self._high[rest >> 14]
        else:
            form = self._high[rest]
        if not 0 <= value < LONGS_KEPT:
            self._times.append(value)
            if len(self._times) > TIMES_KEPT:
                for before in self._times[: TIMES_KEPT // 2]:
                    self.pop(before, None)  # another thread may have done it
                del self._times[: TIMES_KEPT // 2]
        self[value] = form
        return form


class _Sentences(_Kept[tuple[str, ...], bytes]):
    """Records of nothing but strings as they are written, by those: what checks found recurs as a whole. Short ones are kept."""

    def __missing__(self, words: tuple[str, ...]) -> bytes:
        form = b"".join(map(_text_form, words))
        return self.keep(words, form) if len(form) <= SENTENCE_BYTES_MAX else form


class _Words(_Kept[str, bytes]):
    """Short strings as they are written. Most recur: names of topics, models, checks and what these found."""

    def __missing__(self, word: str) -> bytes:
        return self.keep(word, _long_text(word))


_LONGS = _Longs()
_WORDS = _Words()


class _KnownForms(_Kept[bytes, Any]):
    """Records of nothing but strings, by how they are written: most recur. Short ones are kept."""

    def __init__(self, read: Callable[[bytes, int], Any]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, form: bytes) -> Any:
        value = self._read(form, 0)
        return self.keep(form, value) if len(form) <= SENTENCE_BYTES_MAX else value


_HIGH = _Kept[bytes, int]()
"""What the last bytes of an integer as long as a time in milliseconds add to it, by those: they change every eight seconds."""


def _more(body: bytes, at: int, first: int) -> tuple[int, int]:
    """The rest of an integer of several bytes, still zigzag, and where it ends."""
    second = body[at]
    if second <= 0x7F:
        return first & 0x7F | second << 7, at + 1
    high = _HIGH.get(body[at + 1 : at + TIME_BYTES - 1])
    if high is not None:
        return first & 0x7F | (second & 0x7F) << 7 | high, at + TIME_BYTES - 1
    begin, found = at, first & 0x7F
    for shift in range(7, 7 * LONG_BYTES_MAX, 7):
        byte = body[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            break
    if byte > 0x7F or found > UINT64_MAX:
        raise ValueError("an integer has more than 64 bits")
    if at - begin == TIME_BYTES - 1:
        _HIGH.keep(body[begin + 1 : at], found & ~0x3FFF)
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


def _only_words(annotation: Any) -> list[str]:
    """The names of a record's fields, if all are strings, else none."""
    if not isinstance(annotation, type) or not dataclasses.is_dataclass(annotation):
        return []
    parts = list(_parts(annotation))
    return [name for name, _, _ in parts] if all(inner is str for _, inner, _ in parts) else []


# --- writing ---------------------------------------------------------------------------------------------------------


def writing(cls: type[Any], header: bytes) -> Callable[[Any], bytes]:
    """A function from an instance to `header` and its Avro body. Raises `MISFITS`.

    It is one expression, which joins the forms of all fields: to add them one by one takes twice as long.
    """
    return _Writer().made(cls, header)


def long_form(value: int) -> bytes:
    """An integer as it is written. Raises `MISFITS`."""
    return _LONGS[value]


def _text_form(text: str) -> bytes:
    return _WORDS[text] if len(text) <= WORD_CHARS_MAX else _long_text(text)


def _long_text(text: str) -> bytes:
    encoded = text.encode()
    return _LONGS[len(encoded)] + encoded


_FORMS: dict[Any, Callable[[Any], bytes]] = {
    int: _LONGS.__getitem__,
    float: struct.Struct("<d").pack,
    bool: (b"\x00", b"\x01").__getitem__,
    str: _text_form,
    bytes: lambda value: _LONGS[len(value)] + value,
}


class _Writer:
    """Makes expressions of the bytes of values, and knows the names in them. Each uses the value that it is of once, and before all else."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {
            "longs": _LONGS,
            "words": _WORDS,
            "long_text": _long_text,
            "double": _FORMS[float],
        }
        self._used = 0

    def made(self, cls: type[Any], header: bytes) -> Callable[[Any], bytes]:
        parts = [repr(header)] if header else []
        return typing.cast(Callable[[Any], bytes], self._function(_joined([*parts, *self._record(cls, "value")])))

    def _function(self, expression: str) -> Any:
        return eval(f"lambda value: {expression}", self._known)  # noqa: S307  # the text is made of annotations alone

    def _fresh(self, known: Any = None) -> str:
        self._used += 1
        name = f"v{self._used}"
        if known is not None:
            self._known[name] = known
        return name

    def _record(self, cls: type[Any], what: str) -> list[str]:
        name = self._fresh()
        parts: list[str] = []
        for field, annotation, null in _parts(cls):
            parts += self._parts(annotation, f"{name}.{field}" if parts else f"({name} := {what}).{field}", null)
        return parts

    def _parts(self, annotation: Any, what: str, null: str = "0") -> list[str]:
        """Expressions whose bytes, one after the other, are those of the value of the expression `what`."""
        if annotation is int:
            return [f"longs[{what}]"]
        if annotation is float:
            return [f"double({what})"]
        if annotation is bool:
            return [f"(b'\\x01' if {what} else b'\\x00')"]
        if (
            (inner := optional(annotation)) is None
            and typing.get_origin(annotation) is None
            and annotation not in _FORMS
        ):
            return self._record(annotation, what)
        name = self._fresh()
        if annotation is str:
            return [f"(words[{name}] if len({name} := {what}) <= {WORD_CHARS_MAX} else long_text({name}))"]
        if annotation is bytes:
            return [f"longs[len({name} := {what})]", name]
        if inner is not None:
            here, there = (b"\x00", b"\x02") if null == "0" else (b"\x02", b"\x00")
            return [
                f"({here!r} if ({name} := {what}) is None else {_joined([repr(there), *self._parts(inner, name)])})"
            ]
        items = f"[longs[len({name})], *{self._items(annotation, name)}, {ARRAY_END!r}]"
        return [f"(b''.join({items}) if ({name} := {what}) else {ARRAY_END!r})"]

    def _items(self, annotation: Any, name: str) -> str:
        """The forms of an array's entries, or a map's."""
        if typing.get_origin(annotation) is dict:
            key, form = self._fresh(_text_form), self._fresh(self._form(typing.get_args(annotation)[1]))
            return f"[{key}(key) + {form}(value) for key, value in {name}.items()]"
        of = typing.get_args(annotation)[0]
        if len(names := _only_words(of)) > 1:
            words, form = self._fresh(operator.attrgetter(*names)), self._fresh(_Sentences().__getitem__)
            return f"map({form}, map({words}, {name}))"
        return f"map({self._fresh(self._form(of))}, {name})"

    def _form(self, annotation: Any) -> Callable[[Any], bytes]:
        if annotation in _FORMS:
            return _FORMS[annotation]
        return typing.cast(Callable[[Any], bytes], self._function(_joined(self._parts(annotation, "value"))))


def _joined(parts: list[str]) -> str:
    return f"b''.join(({', '.join(parts)},))"


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
    of = typing.get_args(annotation)[0]
    _read_known(source, depth + 2, of, found)
    source.add(depth + 2, f"{found}.append({_read(source, depth + 2, of)})")
    return f"tuple({found})"


def _read_known(source: _Source, depth: int, of: Any, found: str) -> None:
    """Before an entry is read: whether it is a record of short strings alone, whose lengths are an even byte each. It isn't read, then, if it is known."""
    long, end = [], "at"
    for _ in _only_words(of):
        place, length = source.fresh(), source.fresh()
        long.append(f"({length} := body[({place} := {end})]) & 129")
        end = f"{place} + 1 + ({length} >> 1)"
    if long:
        known, after = source.fresh(), source.fresh()
        source.known[known] = _KnownForms(reading(of))
        source.add(depth, f"if not ({' or '.join(long)}):", f"    {after} = {end}")
        source.add(depth, f"    {found}.append({known}[body[at:{after}]])", f"    at = {after}", "    continue")
