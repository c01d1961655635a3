"""The closed list of reasons for which something is refused or fails.

A reason alone decides the HTTP status, the gRPC code, the OpenAI error type, the metric label and whether a retry can help.
Events carry the reason's value; `lookup` turns it back, and a value that a newer process wrote reads as `internal_error`.
"""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """One reason: (value, HTTP status, gRPC code, OpenAI error type, retriable, text)."""

    INVALID_REQUEST = ("invalid_request", 400, "INVALID_ARGUMENT", "invalid_request_error", False, "The request is not valid.")
    UNSUPPORTED_PARAMETER = ("unsupported_parameter", 400, "INVALID_ARGUMENT", "invalid_request_error", False, "A parameter is not served.")
    CONTEXT_LENGTH_EXCEEDED = (
        "context_length_exceeded", 400, "INVALID_ARGUMENT", "invalid_request_error", False, "Prompt and answer don't fit the model's context.")  # fmt: skip
    INVALID_API_KEY = ("invalid_api_key", 401, "UNAUTHENTICATED", "authentication_error", False, "The API key is missing, unknown or revoked.")
    INVALID_GRANT = ("invalid_grant", 401, "UNAUTHENTICATED", "authentication_error", False, "The record's grant is missing, forged or revoked.")
    GRANT_EXPIRED = ("grant_expired", 401, "UNAUTHENTICATED", "authentication_error", False, "The record's grant has expired; get a new one.")
    PERMISSION_DENIED = ("permission_denied", 403, "PERMISSION_DENIED", "permission_error", False, "The key may not do this.")
    MODEL_NOT_FOUND = ("model_not_found", 404, "NOT_FOUND", "invalid_request_error", False, "No such model is deployed.")
    NOT_FOUND = ("not_found", 404, "NOT_FOUND", "invalid_request_error", False, "There is no such thing.")
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405, "UNIMPLEMENTED", "invalid_request_error", False, "The path doesn't take this method.")
    CONFLICT = ("conflict", 409, "ALREADY_EXISTS", "invalid_request_error", False, "It contradicts what exists.")
    PAYLOAD_TOO_LARGE = ("payload_too_large", 413, "INVALID_ARGUMENT", "invalid_request_error", False, "The request is too large.")
    RATE_LIMITED = ("rate_limited", 429, "RESOURCE_EXHAUSTED", "rate_limit_error", True, "A limit of the tenant is reached.")
    OVERLOADED = ("overloaded", 503, "UNAVAILABLE", "server_error", True, "The model can't serve this in time.")
    NO_WORKER = ("no_worker", 503, "UNAVAILABLE", "server_error", True, "No worker serves the model at present.")
    UNAVAILABLE = ("unavailable", 503, "UNAVAILABLE", "server_error", True, "The log can't be reached at present.")
    DEADLINE_EXCEEDED = ("deadline_exceeded", 504, "DEADLINE_EXCEEDED", "timeout_error", True, "The deadline passed before the answer.")
    TIME_LIMIT_EXCEEDED = ("time_limit_exceeded", 504, "DEADLINE_EXCEEDED", "timeout_error", True, "The answer took longer than it may.")
    CANCELLED = ("cancelled", 499, "CANCELLED", "cancelled", False, "The caller cancelled.")
    SLOW_READER = ("slow_reader", 499, "CANCELLED", "cancelled", True, "The reader fell too far behind and was disconnected.")
    WORKER_LOST = ("worker_lost", 503, "UNAVAILABLE", "server_error", True, "The worker died, and the answer can't be continued exactly.")
    POISONED = ("poisoned", 500, "INTERNAL", "server_error", False, "The request stopped several workers in turn.")
    ENGINE_ERROR = ("engine_error", 500, "INTERNAL", "server_error", False, "The model failed on this request.")
    ANSWER_TOO_LARGE = ("answer_too_large", 500, "INTERNAL", "server_error", False, "The answer is larger than it may be.")
    INCONSISTENT_STREAM = ("inconsistent_stream", 500, "INTERNAL", "server_error", True, "The worker's count differs from the stream.")
    UNDECODABLE = ("undecodable", 400, "INVALID_ARGUMENT", "invalid_request_error", False, "The record is no event.")
    INTERNAL_ERROR = ("internal_error", 500, "INTERNAL", "server_error", True, "Something went wrong inside Headrace.")

    def __init__(self, value: str, http_status: int, grpc_code: str, openai_type: str, retriable: bool, text: str) -> None:
        self._value_ = value
        self.http_status = http_status
        self.grpc_code = grpc_code
        self.openai_type = openai_type
        self.retriable = retriable
        self.text = text


_BY_VALUE = {reason.value: reason for reason in Reason}


def lookup(value: str) -> Reason:
    """The reason with this value; `INTERNAL_ERROR` for one that this version doesn't know."""
    return _BY_VALUE.get(value, Reason.INTERNAL_ERROR)
