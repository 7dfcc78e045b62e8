"""Encodes failures as Anthropic's error object `{"type": "error", "error": {"type", "message"}, "request_id"}`. Pure.

The HTTP status follows from the error's code. Anthropic's own status 529 for an overloaded server is not used: load
balancers know 503, and Anthropic's clients retry after it as well.
"""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.anthropic.schemas import THREAD
from antiphon.services.gateway.edge.http.routing.openapi import ErrorSchema
from antiphon.shared.errors import ServiceError

SCHEMA = ErrorSchema(
    "AnthropicError",
    {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string"},
                    "details": {"type": "object"},
                },
            },
            "request_id": {"type": "string"},
        },
    },
)
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
"""After this, Anthropic's clients send whole conversations, unless their user has asked for a thread."""
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(error: ServiceError) -> str:
    """Returns Anthropic's type of a failure."""
    return _TYPE_OF_STATUS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")


def error_body(error: ServiceError, request_id: str) -> bytes:
    """Returns the JSON of the error object."""
    inner: dict[str, Any] = {"type": error_type(error), "message": error.message}
    if (error.code, error.param) == ("unsupported_parameter", THREAD):
        inner["details"] = _NO_THREADS
    return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})
