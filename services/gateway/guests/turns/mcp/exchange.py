"""One JSON-RPC request over Streamable HTTP and its answer, limited in time and bytes. Runs on a thread.

A server may be slow, endless, malformed or lie about lengths. The whole exchange has a deadline, at which the
connection is shut down: a server that sends a byte now and then never exceeds the timeout of a read.
"""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from antiphon.services.gateway.guests.turns.mcp.errors import ResultUnknownError, ToolFailedError
from antiphon.services.gateway.guests.turns.mcp.outbound import connected
from antiphon.shared import limits
from antiphon.shared.security.outbound import Target

_UNCERTAIN = (408, 502, 503, 504)
"""Statuses with which a proxy answers if it does not know whether the server has done its work."""
_ACCEPTED = (200, 202, 204)


class Answer(NamedTuple):
    """The message that answers a request; None for a notification. `session`: the id that the server has given."""

    message: dict[str, Any] | None
    session: str


class Lines:
    """The connections of all running exchanges, so that a gateway that ends can hang up."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def holding(self, sock: socket.socket) -> Iterator[None]:
        """Keeps a socket in the set inside the block."""
        with self._lock:
            if self._is_closed:
                raise ToolFailedError("the gateway shuts down")
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)

    def close(self) -> None:
        """Ends all exchanges: their threads return soon. No further one begins."""
        with self._lock:
            self._is_closed = True
            for sock in self._open:
                _hang_up(sock)


def exchange(
    lines: Lines, target: Target, message: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float
) -> Answer:
    """Sends a message and returns the answer. Raises ToolFailedError or ResultUnknownError."""
    deadline = time.monotonic() + timeout_s
    connection = connected(target, min(deadline, time.monotonic() + limits.TOOL_LIST_S))
    sock = connection.sock
    end = threading.Timer(max(0.0, deadline - time.monotonic()), _hang_up, (sock,))
    end.daemon = True
    try:
        with lines.holding(sock):
            sock.settimeout(timeout_s)
            end.start()
            return _exchanged(connection, target, message, headers)
    except (OSError, http.client.HTTPException) as error:
        late = time.monotonic() >= deadline
        why = f"no answer within {timeout_s:g} s" if late else str(error) or type(error).__name__
        raise ResultUnknownError(why) from error
    finally:
        end.cancel()
        connection.close()
        sock.close()  # the connection gives it up when the answer says that it ends with the connection


def _exchanged(
    connection: http.client.HTTPConnection, target: Target, message: Mapping[str, Any], headers: Mapping[str, str]
) -> Answer:
    sent = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Accept-Encoding": "identity",
        **headers,
    }
    connection.request("POST", target.path, msgspec.json.encode(message), sent)
    with contextlib.closing(connection.getresponse()) as answer:
        if answer.status in _UNCERTAIN:
            raise ResultUnknownError(f"status {answer.status}")
        if answer.status not in _ACCEPTED:
            told = {"type": "http_error", "code": answer.status, "message": f"status {answer.status}"}
            raise ToolFailedError(f"the server has answered with status {answer.status}", told)
        session = answer.getheader("Mcp-Session-Id", "")
        if "id" not in message:
            return Answer(None, session)
        kind = answer.getheader("Content-Type", "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            return Answer(_streamed(answer, message["id"]), session)
        return Answer(_message(_whole(answer), message["id"]), session)


def _whole(answer: http.client.HTTPResponse) -> bytes:
    data = answer.read(limits.TOOL_ANSWER_BYTES_MAX + 1)
    if len(data) > limits.TOOL_ANSWER_BYTES_MAX:
        raise _bad(f"an answer of more than {limits.TOOL_ANSWER_BYTES_MAX} bytes")
    return data


def _streamed(answer: http.client.HTTPResponse, number: int) -> dict[str, Any]:
    """Returns the message with this id from a stream of events; others, such as progress, are passed over."""
    left, data = limits.TOOL_ANSWER_BYTES_MAX, b""
    while line := answer.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise _bad(f"a stream of more than {limits.TOOL_ANSWER_BYTES_MAX} bytes before the answer")
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data += line[5:].removeprefix(b" ")
        elif not line and data:
            found = _decoded(data)
            if isinstance(found, dict) and found.get("id") == number and ("result" in found or "error" in found):
                return _message(data, number)
            data = b""
    raise ResultUnknownError("the stream ended before the answer")


def _message(data: bytes, number: int) -> dict[str, Any]:
    found = _decoded(data)
    if not isinstance(found, dict) or found.get("id") != number:
        raise _bad("something else than the answer to the request")
    return found


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _bad("something that is not JSON") from error


def _bad(what: str) -> ToolFailedError:
    message = f"the server has answered with {what}"
    return ToolFailedError(message, {"type": "mcp_protocol_error", "code": -32700, "message": message})


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
