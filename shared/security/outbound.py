"""Connections that this process opens because somebody named a URL (a risk of SSRF): to addresses that were checked.

The caller decides which hosts may be named; redirects are its own affair. Blocks: runs on a thread.
"""

import http.client
import ssl
import time
from collections.abc import Callable
from socket import create_connection
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from antiphon.shared.security.public_addresses import Resolve, is_public, resolve

PORTS = {"http": 80, "https": 443}
"""The usual ports of the schemes that are allowed."""
KEPT = "%:/?#[]@!$&'()*+,;="
"""Characters of a URL that have a meaning of their own. All others but ASCII's letters and digits are quoted."""


class PrivateAddressError(Exception):
    """The host has an address to which no connection may be opened, or none at all."""


class Target(NamedTuple):
    """Where a URL leads, in ASCII. `path`: with the query. `name`: the host as the URL has it, in lower case.

    `host`: a name or an address, without brackets. `only_public`: whether its addresses must be public.
    """

    scheme: str
    host: str
    port: int
    path: str
    name: str
    only_public: bool = True


def target_of(url: str) -> Target:
    """Returns the target of a URL. Raises ValueError with what is wrong, as the end of a sentence."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port
        path = quote(parts.path or "/", KEPT) + (f"?{quote(parts.query, KEPT)}" if parts.query else "")
        host = name.encode("idna").decode()
    except ValueError:  # also for a name that has no form in ASCII
        raise ValueError("is not a URL") from None
    if parts.scheme not in PORTS or not name or parts.username is not None:
        raise ValueError("must be a URL with http or https, a host, and no user name")
    return Target(parts.scheme, host, PORTS[parts.scheme] if port is None else port, path, name)


def connected(
    target: Target,
    deadline: float,
    may_connect: Callable[[str], bool] = is_public,
    addresses_of: Resolve = resolve,
) -> http.client.HTTPConnection:
    """Returns a connection on which nothing was sent. `deadline`: monotonic seconds.

    Raises PrivateAddressError, or OSError.
    """
    addresses = addresses_of(target.host, target.port)
    if not addresses or (target.only_public and not all(map(may_connect, addresses))):
        raise PrivateAddressError(f"'{target.host}' has an address inside a private network")
    left_s = max(0.1, deadline - time.monotonic())
    connection = http.client.HTTPConnection(target.host, target.port, timeout=left_s)
    # Connect to the address that was checked: another name lookup could return a different address.
    plain = create_connection((addresses[0], target.port), left_s)
    try:
        secure = ssl.create_default_context().wrap_socket if target.scheme == "https" else None
        connection.sock = plain if secure is None else secure(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise
    return connection
