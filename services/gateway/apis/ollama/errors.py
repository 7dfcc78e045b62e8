"""Encodes failures as Ollama's error object `{"error": MESSAGE}`. Pure."""

import msgspec

from antiphon.services.gateway.edge.http.routing.openapi import ErrorSchema
from antiphon.shared.errors import ServiceError

SCHEMA = ErrorSchema(
    "OllamaError", {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
)


def error_body(error: ServiceError, request_id: str) -> bytes:
    """Returns the JSON of the error object, which has no field for the request id."""
    return msgspec.json.encode({"error": error.message})
