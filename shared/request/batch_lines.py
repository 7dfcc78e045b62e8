"""The lines of batch files in OpenAI's format: reads request lines, builds answer lines. Pure.

A request line:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
An answer line:  {"id": "batch_req_…", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error"}

Used by `antiphon run-batch`, which sends the requests to a server, and by the gateway, which runs batches itself.
"""

import io
import json
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

RETRIED = frozenset({429, 503})
"""Statuses after which a request is sent again a little later."""


class BatchLineError(ValueError):
    """Raised for an invalid line. The message has the reason but not the line number."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


def numbered_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a batch file that are not blank, each with its number from 1.

    `file`: a file in binary mode, which is read line by line. Only a line feed ends a line: JSON texts may contain
    other characters that Python treats as line ends, such as U+2028.
    """
    return ((number, line) for number, line in enumerate(file, 1) if line.strip())


def read_request(line: str | bytes, endpoints: Collection[str]) -> BatchRequest:
    """Returns the request of a line. `endpoints`: the urls that it may have. Raises BatchLineError."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BatchLineError(f"the line is not JSON: {error}") from None
    except RecursionError:
        raise BatchLineError("the line is not JSON: it is nested too deeply") from None
    if not isinstance(found, dict):
        raise BatchLineError("the line must be a JSON object")
    fields = cast(dict[str, Any], found)
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchLineError("'custom_id' must be a text")
    if fields.get("method", "POST") != "POST" or fields.get("url") not in endpoints:
        raise BatchLineError(f"'method' must be POST and 'url' one of {', '.join(endpoints)}")
    if not isinstance(body, dict) or cast(dict[str, Any], body).get("stream"):
        raise BatchLineError("'body' must be an object, without 'stream'")
    return BatchRequest(custom_id, fields["url"], cast(dict[str, Any], body))


def answered(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Returns the line of a request that got an HTTP response."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _line_id(), "custom_id": custom_id, "response": response, "error": None}


def unanswered(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Returns the line of a request that got no response."""
    return {"id": _line_id(), "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def is_good(line: Any) -> bool:
    """Whether an answer line has a response with status 200.

    Raises KeyError or TypeError if it is not an answer line.
    """
    return line.get("response") is not None and line["response"]["status_code"] == 200


def read_answers(data: bytes) -> tuple[bytes, dict[str, bool]]:
    """Returns the complete lines of an answer file, and for each custom_id whether its answer has the status 200.

    An incomplete last line, left over by an interrupted writer, is not returned. Raises BatchLineError, whose message
    begins with the line number, for a line that is not an answer.
    """
    whole = data[: data.rfind(b"\n") + 1]
    found: dict[str, bool] = {}
    for number, line in numbered_lines(io.BytesIO(whole)):
        try:
            answer = json.loads(line)
            found[answer["custom_id"]] = is_good(answer)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BatchLineError(f"line {number} is no answer of a batch") from None
    return whole, found


def _line_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
