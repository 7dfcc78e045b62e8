"""The lines of batch files in OpenAI's format: reads request lines, reads and builds answer lines. Pure.

A request line:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
An answer line:  {"id": "batch_req_…", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error"}

Used by `antiphon run-batch`, which sends the requests to a server, and by the gateway, which runs batches itself.
Bodies are not decoded: as objects of Python they would take many times their size.
"""

import secrets
from collections.abc import Collection, Iterator
from typing import IO, Any, NamedTuple, TypeVar

import msgspec

from antiphon.shared.files import limits as file_limits

T = TypeVar("T")
RETRIED = frozenset({429, 503})
"""Statuses after which a request is sent again a little later."""
_SKIP_BYTES = 2**20
"""The rest of a line that is too long is read in pieces of this size."""


class BatchLineError(ValueError):
    """Raised for an invalid line. The message has the reason but not the line number."""


class Line(NamedTuple):
    """A line of a file. `number` counts from 1; `start` is its position in the file, in bytes."""

    number: int
    start: int
    data: bytes


class BatchRequest(NamedTuple):
    """One request of a batch. `body` is a JSON object."""

    custom_id: str
    url: str
    body: bytes


class Answer(NamedTuple):
    """What an answer line says. `is_good`: whether it has a response with status 200."""

    custom_id: str
    is_good: bool


class _RequestLine(msgspec.Struct):
    custom_id: str = ""
    method: str = "POST"
    url: str = ""
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    """The fields of a body that a batch looks at."""

    stream: bool | None = None
    priority: int | None = None
    background: bool | None = None


class _Response(msgspec.Struct):
    status_code: int


class _AnswerLine(msgspec.Struct):
    custom_id: str
    response: _Response | None


_REQUEST, _BODY = msgspec.json.Decoder(_RequestLine), msgspec.json.Decoder(_Body)
_ANSWER = msgspec.json.Decoder(_AnswerLine)


def request_lines(file: IO[bytes]) -> Iterator[Line]:
    """Yields the lines of an input file, blank ones included. `read_request` refuses one that is too long."""
    return _lines(file, file_limits.BATCH_LINE_BYTES_MAX)


def answer_lines(file: IO[bytes]) -> Iterator[Line]:
    """Yields the lines of an output file, blank ones included, and the incomplete last one of an interrupted writer."""
    return _lines(file, file_limits.BATCH_ANSWER_BYTES_MAX)


def read_request(line: bytes, endpoints: Collection[str], refused: Collection[str] = ("stream",)) -> BatchRequest:
    """Returns the request of a line. Raises BatchLineError.

    `endpoints`: the urls that it may have. `refused`: fields that its body must not set, of those in `_Body`.
    """
    if len(line) > file_limits.BATCH_LINE_BYTES_MAX:
        raise BatchLineError(f"the line is longer than {file_limits.BATCH_LINE_BYTES_MAX} bytes")
    found = _decoded(line, _REQUEST, "the line is not a request")
    if not 0 < len(found.custom_id) <= file_limits.BATCH_ID_CHARS_MAX:
        raise BatchLineError(f"'custom_id' must be a text of 1 to {file_limits.BATCH_ID_CHARS_MAX} characters")
    if found.method != "POST" or found.url not in endpoints:
        raise BatchLineError(f"'method' must be POST and 'url' one of {', '.join(endpoints)}")
    body = bytes(found.body)
    fields = _decoded(body, _BODY, "'body' is not valid")
    for name in refused:
        if getattr(fields, name):
            raise BatchLineError(f"'{name}' is not possible in a batch")
    return BatchRequest(found.custom_id, found.url, body)


def read_answer(line: bytes) -> Answer | None:
    """Returns what an answer line says; None if it is damaged, incomplete or too long."""
    if len(line) > file_limits.BATCH_ANSWER_BYTES_MAX or not line.endswith(b"\n"):
        return None
    try:
        found = _decoded(line, _ANSWER, "")
    except BatchLineError:
        return None
    return Answer(found.custom_id, found.response is not None and found.response.status_code == 200)


def answered(custom_id: str, status: int, request_id: str, body: bytes) -> dict[str, Any]:
    """Returns the line of a request that got an HTTP response, whose body is JSON."""
    # A line feed can only be between two values of the JSON, where a space is as good.
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body.replace(b"\n", b" "))}
    return {"id": _line_id(), "custom_id": custom_id, "response": response, "error": None}


def unanswered(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Returns the line of a request that got no response."""
    return {"id": _line_id(), "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def encoded_answer(line: dict[str, Any]) -> tuple[bytes, bool]:
    """Returns an answer line as bytes, and whether it has a response with status 200.

    An answer that is too large is replaced by an error.
    """
    data = msgspec.json.encode(line) + b"\n"
    if len(data) > file_limits.BATCH_ANSWER_BYTES_MAX:
        message = f"The answer is larger than {file_limits.BATCH_ANSWER_BYTES_MAX} bytes: ask for less in one request."
        return encoded_answer(unanswered(line["custom_id"], "answer_too_large", message))
    response = line["response"]
    return data, response is not None and response["status_code"] == 200


def _lines(file: IO[bytes], max_bytes: int) -> Iterator[Line]:
    """Yields the lines of a file in binary mode. A longer line than `max_bytes` is cut after one byte more.

    The rest of such a line is skipped in pieces. Only a line feed ends a line: JSON texts may contain other characters
    that Python treats as line ends, such as U+2028.
    """
    number = start = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        yield Line(number, start, data)
        start += len(data)
        while data and not data.endswith(b"\n"):
            data = file.readline(min(_SKIP_BYTES, max_bytes))
            start += len(data)


def _decoded(data: bytes, decoder: "msgspec.json.Decoder[T]", what: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BatchLineError(f"{what}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BatchLineError(f"the line is not JSON: {error}") from None
    except RecursionError:
        raise BatchLineError("the line is not JSON: it is nested too deeply") from None


def _line_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
