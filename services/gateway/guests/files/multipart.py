r"""Reads a `multipart/form-data` body piece by piece, so that a large file need not fit into memory. Pure.

    --BOUNDARY\r\n headers \r\n\r\n data \r\n--BOUNDARY\r\n … \r\n--BOUNDARY--

A form is a sequence of parts, each a field with a name and data; a part that has a file name is a file (RFC 7578).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits

_LINE = b"\r\n"
_HEADERS_END = b"\r\n\r\n"
_CHARSETS = frozenset({"utf-8", "iso-8859-1", "latin-1"})
"""Character sets of parameters in the form of RFC 2231, `name*=CHARSET''VALUE`."""
_MARK_BYTES = 2
"""Number of bytes after a boundary that tell what follows: a line break before a part, two hyphens at the form's end.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part. `filename` is None for a field that is not a file."""

    name: str
    filename: str | None


class FormParser:
    """Reads one form. `feed` takes the body in pieces of any size; `end` checks that it is complete."""

    def __init__(self, content_type: str) -> None:
        """`content_type`: the header of the request. Raises ServiceError for another content type."""
        header = Message()
        header["content-type"] = content_type
        boundary = _parameter(header, "content-type", "boundary")
        if header.get_content_type() != "multipart/form-data" or not boundary:
            raise ServiceError("invalid_value", "The request must be a form: 'Content-Type: multipart/form-data'.")
        self._delimiter = _LINE + b"--" + boundary.encode()
        # The first boundary has no line break before it.
        self._buffer = bytearray(_LINE)
        self._in_headers = False
        self._in_data = False
        self._ended = False
        self._num_ignored = 0
        """Number of bytes after the end."""
        self._num_parts = 0

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Yields the parts that begin in a piece of the body, each followed by its data in one or more pieces.

        Raises ServiceError if the form is malformed or has too many parts.
        """
        if not self._ended:
            self._buffer += data
        elif data:
            self._ignore(data)
        while not self._ended:
            if self._in_headers:
                part = self._headers()
                if part is None:
                    return
                yield part
            else:
                chunk, more = self._data()
                if chunk and self._in_data:
                    yield chunk
                if not more:
                    return
                self._next_part()

    def end(self) -> None:
        """Raises ServiceError if the form has not ended."""
        if not self._ended:
            raise _malformed("it ends too early")

    def _data(self) -> tuple[bytes, bool]:
        """Returns the data before the next boundary, and whether the boundary and its mark are in the buffer."""
        at = self._buffer.find(self._delimiter)
        if at < 0:
            return self._take(len(self._buffer) - len(self._delimiter) + 1), False
        return self._take(at), len(self._buffer) >= len(self._delimiter) + _MARK_BYTES

    def _next_part(self) -> None:
        """Skips the boundary at the beginning of the buffer."""
        self._take(len(self._delimiter))
        mark = self._take(_MARK_BYTES)
        self._in_data = False
        if mark == b"--":
            self._ended = True
            self._ignore(self._take(len(self._buffer)))
        elif mark == _LINE:
            self._in_headers = True
        else:
            raise _malformed("a boundary is not at the end of its line")

    def _ignore(self, data: bytes) -> None:
        self._num_ignored += len(data)
        if self._num_ignored > file_limits.FORM_EPILOGUE_BYTES_MAX:
            raise _malformed(f"more than {file_limits.FORM_EPILOGUE_BYTES_MAX} bytes follow its end")

    def _headers(self) -> Part | None:
        """Returns the next part if its headers are in the buffer, else None."""
        at = self._buffer.find(_HEADERS_END)
        if (at if at >= 0 else len(self._buffer)) > file_limits.FORM_HEADER_BYTES_MAX:
            raise _malformed("the headers of a part are too long")
        if at < 0:
            return None
        text = self._take(at).decode("utf-8", "replace")
        self._take(len(_HEADERS_END))
        self._in_headers, self._in_data = False, True
        self._num_parts += 1
        if self._num_parts > file_limits.FORM_PARTS_MAX:
            raise _malformed(f"it has more than {file_limits.FORM_PARTS_MAX} parts")
        headers = HeaderParser().parsestr(text)
        name = _parameter(headers, "content-disposition", "name")
        if name is None:
            raise _malformed("a part has no name")
        return Part(name, _parameter(headers, "content-disposition", "filename"))

    def _take(self, size: int) -> bytes:
        if size <= 0:
            return b""
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def _parameter(headers: Message, header: str, name: str) -> str | None:
    """Returns a parameter of a header; None if it has none. Raises ServiceError for one that cannot be decoded."""
    try:
        found = headers.get_param(name, header=header)
        if not isinstance(found, tuple):
            return found
        charset, _, value = found
        if (charset or "").lower() in _CHARSETS:
            return value.encode("latin-1").decode(charset or "")
    except (LookupError, ValueError):
        pass
    raise _malformed(f"the parameter '{name}' of a header cannot be decoded: use UTF-8")


def _malformed(why: str) -> ServiceError:
    return ServiceError("invalid_value", f"The form in the request body is malformed: {why}.")
