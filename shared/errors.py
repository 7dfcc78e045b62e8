"""Expected failures: the table of error codes with their HTTP status, and the exception that carries a code.

There are three kinds of failure. A broken invariant is an `assert`: the actor stops and its process exits. An expected
failure is a `ServiceError` with a code of the table: it becomes an error reply on the bus and an HTTP error whose
message is for the user. Overload is a `ServiceError` that is raised at admission, with a time after which to retry.
"""

from typing import NamedTuple


class Code(NamedTuple):
    """The HTTP status and error type of a code. `retryable`: the same request may succeed elsewhere or later."""

    status: int
    type: str
    retryable: bool = False


CODES: dict[str, Code] = {
    "invalid_value": Code(400, "invalid_request_error"),
    "missing_required_parameter": Code(400, "invalid_request_error"),
    "invalid_json": Code(400, "invalid_request_error"),
    "unsupported_parameter": Code(400, "invalid_request_error"),
    "previous_response_not_found": Code(400, "invalid_request_error"),
    "websocket_connection_limit_reached": Code(400, "invalid_request_error"),
    "context_length_exceeded": Code(400, "invalid_request_error"),
    "invalid_api_key": Code(401, "authentication_error"),
    "permission_denied": Code(403, "permission_error"),
    "model_not_found": Code(404, "invalid_request_error"),
    "not_found": Code(404, "invalid_request_error"),
    "method_not_allowed": Code(405, "invalid_request_error"),
    "idempotency_conflict": Code(409, "conflict_error"),
    "conversation_changed": Code(409, "conflict_error", retryable=True),
    "stream_taken": Code(409, "conflict_error"),
    "stream_expired": Code(410, "invalid_request_error"),
    "request_too_large": Code(413, "invalid_request_error"),
    "rate_limit_exceeded": Code(429, "rate_limit_error", retryable=True),
    "client_closed_request": Code(499, "client_closed_request"),
    "internal_error": Code(500, "server_error"),
    "engine_failure": Code(500, "server_error"),
    "server_is_overloaded": Code(503, "service_unavailable_error", retryable=True),
    "no_engine": Code(503, "service_unavailable_error", retryable=True),
    "no_tokenizer": Code(503, "service_unavailable_error", retryable=True),
    "no_vision": Code(503, "service_unavailable_error", retryable=True),
    "no_detokenizer": Code(503, "service_unavailable_error", retryable=True),
    "bus_unavailable": Code(503, "service_unavailable_error", retryable=True),
    "draining": Code(503, "service_unavailable_error", retryable=True),
    "actor_stopped": Code(503, "service_unavailable_error", retryable=True),
    "timeout": Code(504, "timeout_error", retryable=True),
    "deadline_exceeded": Code(504, "timeout_error"),
}


class ServiceError(Exception):
    """An expected failure, with a message that tells the user what to do."""

    def __init__(self, code: str, message: str, *, param: str = "", retry_after_s: float = 0.0) -> None:
        assert code in CODES, code
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status of this failure."""
        return CODES[self.code].status

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed on another replica or a little later."""
        return CODES[self.code].retryable
