"""The listening socket of the gateways, which the launcher opens and all gateways inherit.

A connection is accepted by the gateway that is first to find time. So a gateway that is dead, frozen or busy leaves
connections to the others. The launcher keeps the socket open: while the only gateway restarts, connections wait in the
backlog.
"""

import errno
import socket

from shared.flags import SettingsError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Opens and returns a listening socket. Port 0 selects a free port. Raises SettingsError."""
    family, address = _resolve(host, port)
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
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
