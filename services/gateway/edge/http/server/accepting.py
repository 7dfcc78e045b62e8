"""Accepts the connections of a gateway's own listening socket. No bus.

asyncio's own loop, when the process has no descriptor left, logs thousands of tracebacks a second and does nothing
else. Here accepting pauses, and the connections wait, so that other gateways can take them (`waiting`).
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from shared.observability.rare_logs import RareLog

ACCEPTED_AT_ONCE = 2048
"""Connections accepted before other work of the event loop: as many as wait at most."""
PAUSE_S = 0.2
"""Time without accepting after a failure, seconds."""
_rare_log = RareLog(logging.getLogger(__name__))


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
