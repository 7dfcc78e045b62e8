"""Accepts connections that wait in the listening sockets of other gateways. No bus.

The gateways of one server have one listening socket each, and the kernel assigns every connection to one of them, also
to the socket of a gateway that was killed, is frozen or is restarting. Each gateway therefore also holds the sockets of
the others and checks them every `WAITING_LOOK_S`. If connections wait at two checks in a row, their gateway does not
respond, and the gateway that checks first accepts them. A healthy gateway accepts its connections at once, so none are
taken from it.
"""

import asyncio
import socket
import struct
from collections.abc import Sequence

from antiphon.services.gateway.edge.http.server.accepting import Taken, accept, tell_failure
from antiphon.shared import limits

_TCP_INFO_HEAD = struct.Struct("=8B5I")
"""The start of Linux' `struct tcp_info`, up to the field that counts waiting connections of a listening socket."""


def num_waiting(listener: socket.socket) -> int:
    """Returns the number of connections in the accept queue (Linux: `tcpi_unacked` of a listening socket)."""
    return _TCP_INFO_HEAD.unpack(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_HEAD.size))[-1]


async def accept_waiting(listeners: Sequence[socket.socket], taken: Taken) -> None:
    """Accepts waiting connections of other gateways until it is cancelled; then closes its copies of their sockets."""
    before = [0] * len(listeners)
    try:
        while True:
            await asyncio.sleep(limits.WAITING_LOOK_S)
            for index, listener in enumerate(listeners):
                waiting = num_waiting(listener)
                _accept_some(listener, min(before[index], waiting, limits.WAITING_ACCEPTED_MAX), taken)
                before[index] = waiting
    finally:
        for listener in listeners:
            listener.close()


def _accept_some(listener: socket.socket, count: int, taken: Taken) -> None:
    try:
        for _ in range(count):
            if (connection := accept(listener)) is None or not taken(connection):
                return
    except OSError as error:
        tell_failure(error)
