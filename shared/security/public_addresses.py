"""Which addresses of the network a server may open a connection to when a stranger names the host (risk of SSRF)."""

import ipaddress
import socket
from collections.abc import Callable, Collection

_WITH_IPV4 = (ipaddress.ip_network("::ffff:0:0/96"), ipaddress.ip_network("64:ff9b::/96"))
"""Addresses that stand for the IPv4 address in their last 32 bits: mapped ones, and those of DNS64."""
_TUNNELS = tuple(map(ipaddress.ip_network, ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")))
"""Addresses that lead to IPv4 addresses in other ways, which no web server needs."""
Resolve = Callable[[str, int], list[str]]


def is_public(address: str) -> bool:
    """Whether an IP address is public: neither private, loopback, link-local, nor reserved.

    An IPv6 address that stands for an IPv4 address is public if that one is.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if any(ip in network for network in _WITH_IPV4):
        ip = ipaddress.IPv4Address(int(ip) % 2**32)
    elif any(ip in network for network in _TUNNELS):
        return False
    return ip.is_global and not ip.is_multicast


def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a host. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def listed(domains: str) -> tuple[str, ...]:
    """Returns the names in a list with commas, in lower case."""
    return tuple(name.strip().lower() for name in domains.split(",") if name.strip())


def is_listed(host: str, domains: Collection[str]) -> bool:
    """Whether a host is one of these, or below one that begins with a dot."""
    return any(host == name or (name.startswith(".") and host.endswith(name)) for name in domains)
