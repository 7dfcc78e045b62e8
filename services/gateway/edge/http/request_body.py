"""Reads the body of a request, up to the allowed size and time: whole, or piece by piece. Decodes JSON.

A whole body is decoded to a struct, with errors that name the field. Decoders skip unknown fields, because
`request_fields` has checked the names of the fields before.

Bodies that are read whole stay in memory while their requests run, so `HeldBody` counts their bytes: a gateway has
`BODIES_BYTES_MAX` for all bodies, of which no API key may take the room of the others.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive

from antiphon.services.gateway.edge.http.disconnect import ClientGoneError
from antiphon.shared import limits
from antiphon.shared.actors.fair_work import Shares
from antiphon.shared.errors import ServiceError

T = TypeVar("T")
RawFields = dict[str, msgspec.Raw]
_FIELDS = msgspec.json.Decoder(RawFields)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_TYPES = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_RETRY_AFTER_S = 1.0
_MARKS = (b",", b"[", b"{")
"""Each JSON value but the first has at least one of these before it."""
_PIECE_BYTES_MIN = 64 * 1024
"""Bytes of an upload that must arrive within `BODY_READ_S`, so that a byte now and then does not keep it open."""


class HeldBody:
    """The bytes of one request's body, which count towards the part of its key until `release`.

    `receive` takes the place of the connection's: it counts an announced body before its first byte is read, and any
    other as it arrives.
    """

    def __init__(self, shares: Shares, key: str, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> None:
        self._shares, self._key = shares, key
        self._announced = _announced(headers)
        self._receive = receive
        self._num_received = self._num_held = 0

    async def receive(self) -> Message:
        """Returns the next message. Raises ServiceError('server_is_overloaded') if there is no room for the body."""
        self._hold(self._announced)
        message = await self._receive()
        self._num_received += len(message.get("body", b""))
        self._hold(self._num_received)
        return message

    def release(self) -> None:
        """Stops counting the body. Called when the request has ended."""
        if self._num_held:
            self._shares.give_back(self._key, self._num_held)
            self._num_held = 0

    def _hold(self, size: int) -> None:
        # What is larger than a body may be is not kept (see `read`).
        more = min(size, limits.BODY_BYTES_MAX) - self._num_held
        if more > 0:
            if not self._shares.take(self._key, more):
                message = "The server holds too many large request bodies. Try again later."
                raise ServiceError("server_is_overloaded", message, retry_after_s=_RETRY_AFTER_S)
            self._num_held += more


async def read(headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
    """Returns the whole body.

    Raises ServiceError if the body is too large or too slow, or has too many JSON values; ClientGoneError if the client
    disconnects.
    """
    body, more = bytearray(), True
    _check_size(_announced(headers))
    try:
        async with asyncio.timeout(limits.BODY_READ_S):
            while more:
                piece, more = await _next(receive)
                body += piece
                _check_size(len(body))
    except TimeoutError:
        raise ServiceError(
            "timeout", f"The request body did not arrive within {limits.BODY_READ_S:g} seconds."
        ) from None
    data = bytes(body)
    check_values(data)
    return data


def check_values(body: bytes) -> None:
    """Raises ServiceError if a body may have more JSON values than `JSON_VALUES_MAX`.

    A value is at least one character long and takes about 60 bytes when it is decoded, and nothing else happens in the
    process meanwhile. So the values are counted before, by the characters that begin or separate them. Those within
    texts are counted too, which is exact enough for a limit far above all uses.
    """
    if len(body) > limits.JSON_VALUES_MAX and sum(map(body.count, _MARKS)) > limits.JSON_VALUES_MAX:
        raise ServiceError("request_too_large", f"The body has more than {limits.JSON_VALUES_MAX} JSON values.")


async def pieces(headers: Iterable[tuple[bytes, bytes]], receive: Receive, max_bytes: int) -> AsyncIterator[bytes]:
    """Yields a body piece by piece, so that it may be larger than memory.

    Raises ServiceError if the body is larger than `max_bytes`, or if it does not go on arriving; ClientGoneError if the
    client disconnects.
    """
    size, more = 0, True
    loop, wanted, deadline = asyncio.get_running_loop(), 0, 0.0
    too_large = ServiceError("request_too_large", f"The request body is larger than {max_bytes} bytes.")
    if _announced(headers) > max_bytes:
        raise too_large
    while more:
        if size >= wanted:
            wanted, deadline = size + _PIECE_BYTES_MIN, loop.time() + limits.BODY_READ_S
        try:
            async with asyncio.timeout_at(deadline):
                piece, more = await _next(receive)
        except TimeoutError:
            raise ServiceError(
                "timeout", f"Less than {_PIECE_BYTES_MIN} bytes arrived within {limits.BODY_READ_S:g} seconds."
            ) from None
        size += len(piece)
        if size > max_bytes:
            raise too_large
        yield piece


def _check_size(size: int) -> None:
    if size > limits.BODY_BYTES_MAX:
        raise ServiceError("request_too_large", f"The request body is larger than {limits.BODY_BYTES_MAX} bytes.")


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


def _announced(headers: Iterable[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def read_fields(body: bytes) -> RawFields:
    """Returns the names of a body's fields with their undecoded values. Raises ServiceError if it is no JSON object."""
    return read_body(body, _FIELDS)


def read_any(raw: msgspec.Raw) -> Any:
    """Returns any JSON value, decoded. Raises ServiceError('invalid_json')."""
    return read_body(raw, _ANYTHING)


_ANYTHING: "msgspec.json.Decoder[Any]" = msgspec.json.Decoder()


def read_body(body: bytes | msgspec.Raw, decoder: "msgspec.json.Decoder[T]") -> T:
    """Returns the body as a struct. Raises ServiceError that names the wrong field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _blame(str(error)) from None
    except RecursionError:
        raise ServiceError("invalid_json", "The request body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise ServiceError("invalid_json", "The request body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        if not bytes(body).strip():
            raise ServiceError("invalid_json", "The request body is empty: send a JSON object.") from None
        raise ServiceError("invalid_json", f"The request body is not valid JSON: {error}.") from None


def _blame(reason: str) -> ServiceError:
    """Converts msgspec's error message to an error in OpenAI's wording."""
    at = _PATH.search(reason)
    path = at["path"] if at else ""
    if missing := _MISSING.search(reason):
        param = f"{path}.{missing['field']}".lstrip(".")
        return ServiceError("missing_required_parameter", f"Missing required parameter: '{param}'.", param=param)
    subject = f"'{path}'" if path else "The request body"
    if types := _TYPES.search(reason):
        rule = f"must be {_words(types['expected'])}, not {_words(types['got'])}"
    else:
        rule = "is not valid: " + _PATH.sub("", reason)
    return ServiceError("invalid_value", f"{subject} {rule}.", param=path)


def _words(types: str) -> str:
    return " or ".join(_NAMES.get(name, name) for name in types.split(" | "))
