"""A process of another user of the machine that takes a port as soon as it is free, and plays a NATS server there.

Only root can start one.
"""

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass

UID = 65534
INFO = (
    b'INFO {"server_id":"X","version":"2.15.1","proto":1,"headers":true,"auth_required":true,"max_payload":1048576}\r\n'
)


@dataclass
class PortThief:
    """`take` waits until the port is its own, `end` returns everything that was sent to it."""

    _told: int
    _orders: int
    _pid: int

    def take(self) -> None:
        assert os.read(self._told, 1) == b"w"

    def visited(self) -> None:
        """Returns when somebody has connected, or tried to, and has got the server's first line."""
        assert os.read(self._told, 1) == b"v"

    def end(self) -> bytes:
        os.close(self._orders)
        received = b""
        while data := os.read(self._told, 65536):
            received += data
        os.waitpid(self._pid, 0)
        os.close(self._told)
        return received.partition(b"=")[2]


def start(port: int) -> PortThief:
    """Forks the process, which holds no other file of this one than the pipes."""
    told, tells = os.pipe()
    ordered, orders = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(told)
            os.close(orders)
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            _steal(port, tells, ordered)
        finally:
            os._exit(0)
    os.close(tells)
    os.close(ordered)
    return PortThief(told, orders, pid)


def _steal(port: int, tells: int, ordered: int) -> None:
    server = _bound(port, ordered)
    if server is None:
        return
    os.write(tells, b"w")
    sockets: list[socket.socket] = []
    received = b""
    while True:
        ready = select.select([ordered, server, *sockets], [], [])[0]
        if ordered in ready:
            os.write(tells, b"=" + received)
            return
        for each in ready:
            if each is server:
                visitor, _ = server.accept()
                visitor.sendall(INFO)
                os.write(tells, b"v")
                sockets.append(visitor)
            elif isinstance(each, socket.socket):
                data = b""
                with contextlib.suppress(OSError):
                    data = each.recv(65536)
                received += data
                if not data:
                    sockets.remove(each)
                    each.close()


def _bound(port: int, ordered: int) -> socket.socket | None:
    while not select.select([ordered], [], [], 0)[0]:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    return None


@contextlib.contextmanager
def thief(port: int) -> Iterator[PortThief]:
    """A thief that is ended even if the test fails."""
    made = start(port)
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):
            os.close(made._orders)
