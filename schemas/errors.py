"""The root of every exception in Headrace. A refusal is an event; an exception is a bug or the outside world."""

from __future__ import annotations

from schemas.reasons import Reason


class HeadraceError(Exception):
    """Anything that Headrace raises itself.

    Attributes:
        reason: why, from the closed list; it alone decides the HTTP status, gRPC code and metric label.
        message: what is wrong and what to do about it, fit for the caller to read; never holds a secret.
        param: the field of the caller's input that is at fault, such as `sampling.stop[2]`, or None.
        retry_after_ms: how long to wait before trying again, or None if that is unknown or useless.
    """

    def __init__(
        self, reason: Reason, message: str, *, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    @property
    def retriable(self) -> bool:
        """Whether the same call may succeed later."""
        return self.reason.retriable


class Undecodable(HeadraceError):
    """A record's bytes are no event: junk, cut short, null, or of a type nobody knows. Belongs in `dead-letters`."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(Reason.UNDECODABLE, message, param=param)


class UnknownSchema(Undecodable):
    """A record's fingerprint belongs to no known schema; the topic `schemas` may know it.

    Attributes:
        fingerprint: the eight bytes after the marker, as lower-case hex.
    """

    def __init__(self, fingerprint: str) -> None:
        super().__init__(
            f"no schema is known with the fingerprint {fingerprint}; the writer should have published it to the topic `schemas`"
        )
        self.fingerprint = fingerprint


class InvalidField(Undecodable):
    """A JSON record is well-formed but a field is missing, unknown or of the wrong type."""
