"""Accepts the connections of a gateway's own listening socket, and makes their protocol objects. No bus.

asyncio's own loop, when the process has no descriptor left, logs thousands of tracebacks a second and does nothing
else. Here accepting pauses, and the connections wait, so that other gateways can take them (`waiting`).
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from antiphon.services.gateway.edge.http.server.places import Place, Places
from antiphon.shared import limits
from antiphon.shared.observability.rare_logs import RareLog

ACCEPTED_AT_ONCE = 2048
"""Connections accepted before other work of the event loop: as many as wait at most."""
PAUSE_S = 0.2
"""Time without accepting after a failure, seconds."""
_log = logging.getLogger(__name__)
_rare_log = RareLog(_log)


Taken = Callable[[socket.socket], bool]
"""Gets an accepted connection. Returns whether there is room for more: a connection that is closed for another one
gives its descriptor back only in the next turn of the event loop."""


class Acceptor:
    """Accepts the connections of one listening socket, which is not closed here."""

    def __init__(self, listener: socket.socket, taken: Taken) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._taken = taken
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accepts connections as they arrive."""
        self._loop.add_reader(self._listener.fileno(), self._accept_all)

    def stop(self) -> None:
        """Accepts no more connections. May be called again."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())

    def _accept_all(self) -> None:
        try:
            for _ in range(ACCEPTED_AT_ONCE):
                if (connection := accept(self._listener)) is None or not self._taken(connection):
                    return
        except OSError as error:
            tell_failure(error)
            self._loop.remove_reader(self._listener.fileno())
            self._pause = self._loop.call_later(PAUSE_S, self.start)


class Connections:
    """Makes the protocol objects of accepted connections, with TLS after the handshake. Each has one of the places."""

    def __init__(
        self, places: Places, make: Callable[..., asyncio.Protocol], context: ssl.SSLContext | None = None
    ) -> None:
        """`make` returns a protocol object, with the connection's `place` as argument."""
        self._places, self._make, self._context = places, make, context
        self._handed = set[asyncio.Task[object]]()

    def take(self, connection: socket.socket) -> bool:
        """See Taken."""
        place = self._places.take()
        connecting = asyncio.get_running_loop().connect_accepted_socket(
            partial(self._make, place=place),
            connection,
            ssl=self._context,
            ssl_handshake_timeout=limits.HEADER_READ_S if self._context else None,
        )
        task = asyncio.create_task(connecting)
        place.close = task.cancel
        self._handed.add(task)
        task.add_done_callback(partial(self._handed_over, connection, place))
        return len(self._places) < self._places.size

    def _handed_over(self, connection: socket.socket, place: Place, task: "asyncio.Task[object]") -> None:
        self._handed.discard(task)
        error = None if task.cancelled() else task.exception()  # cancelled: closed to make room
        if error is not None and not isinstance(error, OSError):  # OSError: the client has left, or a handshake failed
            _log.error("a connection could not be served", exc_info=error)
        if error is not None or task.cancelled():
            place.leave()
            with contextlib.suppress(OSError):
                connection.close()


def accept(listener: socket.socket) -> socket.socket | None:
    """Returns a connection; None if none waits. Raises OSError if one waits and cannot be accepted now."""
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # another gateway was faster, or the client has left
        return None
    connection.setblocking(False)
    return connection


def tell_failure(error: OSError) -> None:
    """Logs that a connection could not be accepted, but not each time."""
    _rare_log.warning("accept", "no connection can be accepted now: %s", error.strerror)
