"""Encodes failures as Anthropic's error object `{"type": "error", "error": {"type", "message"}, "request_id"}`. Pure.

The HTTP status follows from the error's code. Anthropic's own status 529 for an overloaded server is not used: load
balancers know 503, and Anthropic's clients retry after it as well.
"""

import msgspec

from services.gateway.edge.http.routing.openapi import ErrorSchema
from shared.errors import ServiceError

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
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    },
)
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
    inner = {"type": error_type(error), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})
