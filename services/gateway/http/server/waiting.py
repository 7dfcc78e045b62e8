"""Accepts connections that wait in the listening sockets of other gateways. No bus.

The gateways of one server have one listening socket each, and the kernel assigns every connection to one of them, also
to the socket of a gateway that was killed, is frozen or is restarting. Each gateway therefore also holds the sockets of
the others and checks them every `WAITING_LOOK_S`. If connections wait at two checks in a row, their gateway does not
respond, and the gateway that checks first accepts them. A healthy gateway accepts its connections at once, so none are
taken from it.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence

from shared import limits

_log = logging.getLogger(__name__)

_TCP_INFO_HEAD = struct.Struct("=8B5I")
"""The start of Linux' `struct tcp_info`, up to the field that counts waiting connections of a listening socket."""


def num_waiting(listener: socket.socket) -> int:
    """Returns the number of connections in the accept queue (Linux: `tcpi_unacked` of a listening socket)."""
    return _TCP_INFO_HEAD.unpack(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_HEAD.size))[-1]


async def accept_waiting(
    listeners: Sequence[socket.socket], connected: Callable[[socket.socket], Awaitable[object]]
) -> None:
    """Accepts waiting connections of other gateways until it is cancelled; then closes its copies of their sockets.

    `connected` is called with each connection, in a task of its own: it may wait for a TLS handshake.
    """
    handed: set[asyncio.Task[None]] = set()
    before = [0] * len(listeners)
    try:
        while True:
            await asyncio.sleep(limits.WAITING_LOOK_S)
            for index, listener in enumerate(listeners):
                waiting = num_waiting(listener)
                for _ in range(min(before[index], waiting, limits.WAITING_ACCEPTED_MAX)):
                    if (connection := _accept(listener)) is None:
                        break
                    task = asyncio.create_task(_hand_over(connection, connected))
                    handed.add(task)
                    task.add_done_callback(handed.discard)
                before[index] = waiting
    finally:
        for listener in listeners:
            listener.close()


def _accept(listener: socket.socket) -> socket.socket | None:
    """Returns a connection; None if another gateway was faster or the client has left."""
    try:
        connection, _ = listener.accept()
    except OSError:  # BlockingIOError, ECONNABORTED; out of descriptors: the connection keeps waiting
        return None
    connection.setblocking(False)
    return connection


async def _hand_over(connection: socket.socket, connected: Callable[[socket.socket], Awaitable[object]]) -> None:
    try:
        await connected(connection)
    except OSError as error:  # includes a failed TLS handshake
        _log.debug("a connection ended before its first request: %s", error)
        with contextlib.suppress(OSError):
            connection.close()
