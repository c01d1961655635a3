"""What the log and the object store refuse alike: an event that is larger than they take."""

from __future__ import annotations

from aiokafka.errors import MessageSizeTooLargeError

from schemas.errors import HeadraceError
from schemas.reasons import Reason


class RecordTooLarge(HeadraceError, MessageSizeTooLargeError):  # type: ignore[misc]  # aiokafka has no types
    """The record is larger than a topic takes (`schemas.topics.RECORD_MAX_BYTES`), or its payload than any (`schemas.payloads.OBJECT_MAX_BYTES`).

    Where `send` itself raises it nothing was written, and what is smaller can be written next.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Reason.PAYLOAD_TOO_LARGE, message)
