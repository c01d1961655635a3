"""Request ids: UUID version 7 (RFC 9562), so that they sort by the time they were made."""

from __future__ import annotations

import re
import uuid

REQUEST_ID_CHARS = 36
_REQUEST_ID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def request_id(unix_ms: int, random: bytes) -> str:
    """A UUIDv7 as its 36 characters, from a time in milliseconds since 1970 and ten random bytes."""
    if len(random) != 10:
        raise ValueError(f"a UUIDv7 takes 10 random bytes, not {len(random)}")
    bits = (unix_ms & (1 << 48) - 1) << 80 | int.from_bytes(random, "big")
    bits = bits & ~(0xF << 76) | 7 << 76
    bits = bits & ~(0x3 << 62) | 2 << 62
    return str(uuid.UUID(int=bits))


def is_request_id(text: str) -> bool:
    """Whether the text is a UUIDv7 in its canonical, lower-case form."""
    return _REQUEST_ID.fullmatch(text) is not None


def unix_ms(text: str) -> int:
    """The time in a UUIDv7, in milliseconds since 1970. Raises ValueError if the text is no UUID."""
    return uuid.UUID(text).int >> 80


def tail(text: str) -> bytes:
    """A UUID's last 8 bytes: in a UUIDv7 of `request_id` but two bits as they were given. Raises ValueError if the text is no UUID."""
    return uuid.UUID(text).bytes[8:]
