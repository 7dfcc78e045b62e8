"""The listening sockets of the gateways, which the launcher opens and the gateways inherit.

The launcher keeps its own copies open: while a gateway starts, or the only one restarts, connections wait in the
backlog instead of being refused. A single gateway has the port exclusively. Several gateways have one socket each on
the same port (SO_REUSEPORT), and the kernel distributes new connections over these sockets. With one shared socket, the
first gateway to wake up could accept a whole burst of connections. Connections that wait in the socket of a dead or
stopped gateway are accepted by the other gateways, which inherit all sockets
(`antiphon.services.gateway.edge.http.server.waiting`).
"""

import errno
import socket

from antiphon.shared.flags import SettingsError

BACKLOG = 2048


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Opens and returns one listening socket for each of `count` gateways. Raises SettingsError.

    Port 0 selects a free port.
    """
    family, address = _resolve(host, port)
    if count == 1:
        return [_open(family, address, shared=False)]
    with _open(family, address, shared=False) as probe:
        # SO_REUSEPORT would let another launcher of the same user share the port: open it exclusively first.
        address = (address[0], probe.getsockname()[1], *address[2:])
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(_open(family, address, shared=True))  # noqa: PERF401 - on failure open sockets are closed
    except SettingsError:
        close(sockets)
        raise
    return sockets


def close(sockets: list[socket.socket]) -> None:
    """Closes the sockets and removes them from the list."""
    while sockets:
        sockets.pop().close()


def _open(family: socket.AddressFamily, address: tuple, *, shared: bool) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        raise SettingsError(_explain(error, address[0], address[1])) from error


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingsError(f"--host: {host!r} is no address of this machine ({error.strerror})") from error
    return found[0][0], found[0][4]


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use. Another server runs there, perhaps another `antiphon serve`: stop it, or choose"
            f" another port with --port {port + 1}, or any free one with --port 0."
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs special rights. Choose one from 1024 on, for example --port 8000."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host: {host} is no address of this machine. Use 127.0.0.1 or, for every network, 0.0.0.0."
    return f"cannot listen on {host} port {port}: {error.strerror}"
