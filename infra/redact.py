"""Keeps secrets out of logs: by the name of a field, and by the shape of a value."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

MASK = "[redacted]"
DEPTH_MAX = 6
"""How deep nested values are searched; what lies deeper is masked whole."""

_NAMES = frozenset({"grant", "authorization", "apikey", "password", "passwd", "secret", "token", "cookie"})
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9-])hr-[A-Za-z0-9_-]{8,}"  # an API key
    r"|eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"  # a JWT, as grants are
    r"|(?i:\bbearer\s+)\S+"
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"  # user:password in an address
)


def redact_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: masks secrets in every field of one log line, nested ones and exceptions included."""
    for name, value in event.items():
        if not name.startswith("_"):
            event[name] = redact_field(name, value)
    return event


def redact_field(name: str, value: Any, depth: int = 0) -> Any:
    """The value, or the mask if the name says it is secret. Numbers are kept: `from_token=3` is no secret."""
    if is_secret(name) and not (value is None or isinstance(value, (bool, int, float))):
        return MASK
    return redact_value(value, depth)


def redact_value(value: Any, depth: int = 0) -> Any:
    """The value with every part masked that looks like a key, a signed token or a password in an address."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return redact_text(value)
    if depth >= DEPTH_MAX:
        return MASK
    if isinstance(value, Mapping):
        return {str(name): redact_field(str(name), inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):  # one Kafka header
        return (value[0], redact_field(value[0], value[1], depth + 1))
    if isinstance(value, (list, tuple, set, frozenset)):
        return [redact_value(inner, depth + 1) for inner in value]
    if isinstance(value, (bytes, bytearray)):
        return redact_text(bytes(value).decode("utf-8", "backslashreplace"))
    return redact_text(repr(value))


def redact_text(text: str) -> str:
    """The text with everything masked that looks like a secret."""
    return _SHAPES.sub(MASK, text)


def is_secret(name: str) -> bool:
    """Whether what has this name is kept from people."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return words[-1] in _NAMES or "".join(words[-2:]) == "apikey"
