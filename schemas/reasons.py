"""The closed list of reasons for which something is refused or fails.

A reason alone decides the HTTP status, the gRPC code, the OpenAI error type, the metric label and whether a retry can help.
Events carry the reason's value; `lookup` turns it back, and a value that a newer process wrote reads as `internal_error`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """One reason. Its value is what events and metrics carry."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    INVALID_GRANT = "invalid_grant"
    GRANT_EXPIRED = "grant_expired"
    PERMISSION_DENIED = "permission_denied"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    NO_WORKER = "no_worker"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    TIME_LIMIT_EXCEEDED = "time_limit_exceeded"
    CANCELLED = "cancelled"
    SLOW_READER = "slow_reader"
    WORKER_LOST = "worker_lost"
    POISONED = "poisoned"
    ENGINE_ERROR = "engine_error"
    ANSWER_TOO_LARGE = "answer_too_large"
    INCONSISTENT_STREAM = "inconsistent_stream"
    PAYLOAD_LOST = "payload_lost"
    UNDECODABLE = "undecodable"
    INTERNAL_ERROR = "internal_error"

    @property
    def http_status(self) -> int:
        """The HTTP status of an answer with this reason."""
        return _MEANINGS[self].http_status

    @property
    def grpc_code(self) -> str:
        """The name of the gRPC status code."""
        return _MEANINGS[self].grpc_code

    @property
    def openai_type(self) -> str:
        """The `type` of an OpenAI error."""
        return _MEANINGS[self].openai_type

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later."""
        return _MEANINGS[self].retriable

    @property
    def text(self) -> str:
        """What it means, for a reader who knows nothing of Headrace."""
        return _MEANINGS[self].text


class _Meaning(NamedTuple):
    http_status: int
    grpc_code: str
    openai_type: str
    retriable: bool
    text: str


# fmt: off
_MEANINGS = {
    Reason.INVALID_REQUEST: _Meaning(400, "INVALID_ARGUMENT", "invalid_request_error", False, "The request is not valid."),
    Reason.UNSUPPORTED_PARAMETER: _Meaning(400, "INVALID_ARGUMENT", "invalid_request_error", False, "A parameter is not served."),
    Reason.CONTEXT_LENGTH_EXCEEDED: _Meaning(400, "INVALID_ARGUMENT", "invalid_request_error", False, "Prompt and answer don't fit the model's context."),
    Reason.INVALID_API_KEY: _Meaning(401, "UNAUTHENTICATED", "authentication_error", False, "The API key is missing, unknown or revoked."),
    Reason.INVALID_GRANT: _Meaning(401, "UNAUTHENTICATED", "authentication_error", False, "The record's grant is missing, forged or revoked."),
    Reason.GRANT_EXPIRED: _Meaning(401, "UNAUTHENTICATED", "authentication_error", False, "The record's grant has expired; get a new one."),
    Reason.PERMISSION_DENIED: _Meaning(403, "PERMISSION_DENIED", "permission_error", False, "The key may not do this."),
    Reason.MODEL_NOT_FOUND: _Meaning(404, "NOT_FOUND", "invalid_request_error", False, "No such model is deployed."),
    Reason.NOT_FOUND: _Meaning(404, "NOT_FOUND", "invalid_request_error", False, "There is no such thing."),
    Reason.METHOD_NOT_ALLOWED: _Meaning(405, "UNIMPLEMENTED", "invalid_request_error", False, "The path doesn't take this method."),
    Reason.CONFLICT: _Meaning(409, "ALREADY_EXISTS", "invalid_request_error", False, "It contradicts what exists."),
    Reason.PAYLOAD_TOO_LARGE: _Meaning(413, "INVALID_ARGUMENT", "invalid_request_error", False, "The request is too large."),
    Reason.RATE_LIMITED: _Meaning(429, "RESOURCE_EXHAUSTED", "rate_limit_error", True, "A limit of the tenant is reached."),
    Reason.OVERLOADED: _Meaning(503, "UNAVAILABLE", "server_error", True, "The model can't serve this in time."),
    Reason.NO_WORKER: _Meaning(503, "UNAVAILABLE", "server_error", True, "No worker serves the model at present."),
    Reason.UNAVAILABLE: _Meaning(503, "UNAVAILABLE", "server_error", True, "The log can't be reached at present."),
    Reason.DEADLINE_EXCEEDED: _Meaning(504, "DEADLINE_EXCEEDED", "timeout_error", True, "The deadline passed before the answer."),
    Reason.TIME_LIMIT_EXCEEDED: _Meaning(504, "DEADLINE_EXCEEDED", "timeout_error", True, "The answer took longer than it may."),
    Reason.CANCELLED: _Meaning(499, "CANCELLED", "cancelled", False, "The caller cancelled."),
    Reason.SLOW_READER: _Meaning(499, "CANCELLED", "cancelled", True, "The reader fell too far behind and was disconnected."),
    Reason.WORKER_LOST: _Meaning(503, "UNAVAILABLE", "server_error", True, "Its worker is gone, and the answer can't be continued exactly."),
    Reason.POISONED: _Meaning(500, "INTERNAL", "server_error", False, "The request stopped several workers in turn."),
    Reason.ENGINE_ERROR: _Meaning(500, "INTERNAL", "server_error", False, "The model failed on this request."),
    Reason.ANSWER_TOO_LARGE: _Meaning(500, "INTERNAL", "server_error", False, "The answer is larger than it may be."),
    Reason.INCONSISTENT_STREAM: _Meaning(500, "INTERNAL", "server_error", True, "The worker's count differs from the stream."),
    Reason.PAYLOAD_LOST: _Meaning(500, "DATA_LOSS", "server_error", False, "What was put into the object store is missing or damaged; ask anew."),
    Reason.UNDECODABLE: _Meaning(400, "INVALID_ARGUMENT", "invalid_request_error", False, "The record is no event."),
    Reason.INTERNAL_ERROR: _Meaning(500, "INTERNAL", "server_error", True, "Something went wrong inside Headrace."),
}
# fmt: on
_BY_VALUE = {reason.value: reason for reason in Reason}


def lookup(value: str) -> Reason:
    """The reason with this value; `INTERNAL_ERROR` for one that this version doesn't know."""
    return _BY_VALUE.get(value, Reason.INTERNAL_ERROR)
