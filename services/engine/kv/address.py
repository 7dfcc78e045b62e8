"""The address at which other engines find this one."""

import ipaddress
import socket
from urllib.parse import urlsplit

from antiphon.shared.bus.credentials import server_urls

NATS_PORT = 4222
LOOPBACK = "127.0.0.1"


def default_kv_host(nats: str) -> str:
    """Returns the local address that this machine uses to reach the NATS servers; other engines can reach it too.

    The first server that is not reached over the loopback address determines the result. If there is none (all servers
    are on this machine or cannot be resolved), returns the loopback address.
    """
    ways = (_way(url) for url in server_urls(nats))
    return next((way for way in ways if way and not ipaddress.ip_address(way).is_loopback), LOOPBACK)


def _way(server: str) -> str:
    """Returns the address from which this machine reaches a server; empty if the server's name cannot be resolved."""
    url = urlsplit(server)
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            url.hostname or LOOPBACK, url.port or NATS_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # sends nothing; only selects the route
                return str(sock.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""
    return ""
