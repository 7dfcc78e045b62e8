"""The address at which other engines find this one."""

import socket
from urllib.parse import urlsplit

NATS_PORT = 4222
LOOPBACK = "127.0.0.1"


def default_kv_host(nats: str) -> str:
    """Returns this machine's address on the way to the NATS server, which other engines can reach too.

    It is the loopback address if the server is on this machine, or cannot be found.
    """
    url = urlsplit(nats.split(",")[0].strip())
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            url.hostname or LOOPBACK, url.port or NATS_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # sends nothing: it only chooses the way
                return str(sock.getsockname()[0])
    except OSError:
        return LOOPBACK
    return LOOPBACK
