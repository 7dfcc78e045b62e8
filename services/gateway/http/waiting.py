"""Connections that wait in the listening sockets of the other gateways, which this gateway accepts. No bus.

Several gateways of one server have a listening socket each, and the kernel chooses one for every connection, also that
of a gateway that was killed, is frozen or starts again. Each gateway therefore has the sockets of the others too, and
looks at them every `WAITING_LOOK_S`: connections that wait at two looks in a row get nobody's attention, and whoever
looks first accepts them. A gateway in good health accepts its connections at once, so that nothing is taken from it.
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
    """Returns how many connections nobody has accepted yet (Linux: `tcpi_unacked` of a listening socket)."""
    return _TCP_INFO_HEAD.unpack(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_HEAD.size))[-1]


async def accept_waiting(
    listeners: Sequence[socket.socket], connected: Callable[[socket.socket], Awaitable[object]]
) -> None:
    """Accepts what waits in the sockets of other gateways, until it is cancelled; then it closes its copies of them.

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
    except OSError:  # BlockingIOError, ECONNABORTED; out of descriptors: the connection goes on waiting
        return None
    connection.setblocking(False)
    return connection


async def _hand_over(connection: socket.socket, connected: Callable[[socket.socket], Awaitable[object]]) -> None:
    try:
        await connected(connection)
    except OSError as error:  # a failed TLS handshake is one too
        _log.debug("a connection ended before its first request: %s", error)
        with contextlib.suppress(OSError):
            connection.close()
