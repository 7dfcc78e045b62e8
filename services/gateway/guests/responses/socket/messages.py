"""The messages of clients on a WebSocket, and the event that tells an error. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.request_body import RawFields, read_any, read_fields
from antiphon.shared.errors import CODES, ServiceError
from antiphon.shared.request.checks import missing, refuse

CREATE = "response.create"
_PROCESSED = "response.processed"
"""A client tells that it has worked on a response. There is nothing to do."""
_encode = msgspec.json.Encoder().encode
_TRUE = msgspec.Raw(b"true")


class Create(NamedTuple):
    """A message that asks for a response. `body`: that of the request `POST /v1/responses` for it.

    `generates`: whether the response is generated, and not only prepared. `previous`: id of the response that it
    continues; "": none.
    """

    body: bytes
    generates: bool
    previous: str


def read(data: bytes) -> Create | None:
    """Returns what a message asks for; None if it asks for nothing. Raises ServiceError."""
    request_body.check_values(data)
    fields = read_fields(data)
    kind = _value(fields, "type")
    if kind is None:
        missing("type")
    if kind == _PROCESSED:
        return None
    if kind != CREATE:
        refuse("type", f"must be '{CREATE}': this server knows no other messages")
    generates = given if isinstance(given := _value(fields, "generate"), bool) else None
    if generates is None and given is not None:
        refuse("generate", "must be a boolean")
    _check_transport(fields)
    previous = _value(fields, "previous_response_id")
    body = {name: raw for name, raw in fields.items() if name not in ("type", "generate")}
    return Create(
        body=_encode({**body, "stream": _TRUE}),
        generates=generates is not False,
        previous=previous if isinstance(previous, str) else "",
    )


def error_event(error: ServiceError) -> bytes:
    """Returns the event that tells an error."""
    inner = {
        "type": CODES[error.code].type,
        "code": error.code,
        "message": error.message,
        "param": error.param or None,
    }
    return failure_event(error.status, inner, {})


def failure_event(status: int, error: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """Returns the event that tells an error object with the status of its HTTP response."""
    # OpenAI's library looks for the headers in the error, and Codex next to it.
    more = {"headers": headers} if headers else {}
    return _encode({"type": "error", "status": status, "error": {**error, **more}, **more})


def _check_transport(fields: RawFields) -> None:
    """Raises ServiceError for fields that a WebSocket has no use for, unless they ask for what it does anyway."""
    if _value(fields, "stream") not in (None, True):
        refuse("stream", "cannot be false: on a WebSocket every response is streamed")
    if _value(fields, "background"):
        refuse("background", "is not possible on a WebSocket: send the request to POST /v1/responses")
    if _value(fields, "stream_id") is not None:
        told = "'stream_id' is not supported: open one WebSocket for each conversation that goes on at the same time."
        raise ServiceError("unsupported_parameter", told, param="stream_id")


def _value(fields: RawFields, name: str) -> Any:
    return read_any(fields[name]) if name in fields else None
