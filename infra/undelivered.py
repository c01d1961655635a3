"""Why a record isn't in the log, or may not be. What is too large is refused by the object store alike."""

from __future__ import annotations

from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from schemas.errors import HeadraceError
from schemas.reasons import Reason


class RecordTooLarge(HeadraceError, MessageSizeTooLargeError):  # type: ignore[misc]  # aiokafka has no types
    """The record is larger than a topic takes (`schemas.topics.RECORD_MAX_BYTES`), or its payload than any (`schemas.payloads.OBJECT_MAX_BYTES`).

    Where `send` itself raises it nothing was written, and what is smaller can be written next.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Reason.PAYLOAD_TOO_LARGE, message)


class NotDelivered(HeadraceError, KafkaError):  # type: ignore[misc]  # aiokafka has no types
    """The broker has not confirmed the record, and it may or may not be in the log. Sending it again is right."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


class NoSuchPartition(HeadraceError, KafkaError):  # type: ignore[misc]
    """The topic, or its partition, doesn't exist."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INVALID_REQUEST, message)
