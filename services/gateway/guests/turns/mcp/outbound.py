"""Where a request to an MCP server goes, and the connection to it.

The operator's servers may be anywhere. A URL from a client makes this process open a connection (a risk of SSRF): its
host must be on the operator's list, its addresses must be public, and the connection goes to the address that was
checked. Redirects are never followed. Runs on a thread.
"""

import http.client
import ssl
import time
from collections.abc import Callable, Collection
from socket import create_connection
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from antiphon.services.gateway.guests.turns.mcp.errors import ToolFailedError
from antiphon.shared.request.checks import refuse
from antiphon.shared.security.public_addresses import Resolve, is_listed, is_public, resolve

_PORTS = {"http": 80, "https": 443}
_KEPT = "%:/?#[]@!$&'()*+,;="


class Target(NamedTuple):
    """Where a server is, in ASCII. `only_public`: whether its addresses must be public."""

    scheme: str
    host: str
    port: int
    path: str
    only_public: bool


def target_of(url: str, *, only_public: bool) -> Target:
    """Returns the target of a URL. Raises ValueError with what is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
        raise ValueError("must be a URL with http or https, a host, and no user name")
    host = parts.hostname.encode("idna").decode()
    path = quote(parts.path or "/", _KEPT) + (f"?{quote(parts.query, _KEPT)}" if parts.query else "")
    return Target(parts.scheme, host, parts.port or _PORTS[parts.scheme], path, only_public)


def stranger(url: str, allowed: Collection[str], param: str) -> Target:
    """Returns the target of a client's URL. Raises ServiceError that names `param`."""
    try:
        target = target_of(url, only_public=True)
    except ValueError:  # also for a name that has no form in ASCII
        refuse(param, "must be a URL with http or https, a host, and no user name")
    if not is_listed(target.host.lower(), allowed):
        refuse(
            param,
            f"names the host '{target.host[:100]}', which is not allowed: have the server started with "
            "--allowed-mcp-hosts, or use a server that the operator has configured (--mcp-servers)",
        )
    if target.port != _PORTS[target.scheme]:
        refuse(param, f"must have the usual port of {target.scheme}")
    return target


def connected(
    target: Target,
    deadline: float,
    may_connect: Callable[[str], bool] = is_public,
    addresses_of: Resolve = resolve,
) -> http.client.HTTPConnection:
    """Returns a connection. `deadline`: monotonic seconds. Raises ToolFailedError: nothing was sent then."""
    try:
        addresses = addresses_of(target.host, target.port)
        if not addresses or (target.only_public and not all(map(may_connect, addresses))):
            raise ToolFailedError(f"'{target.host}' has an address inside a private network")
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
    except OSError as error:
        raise ToolFailedError(f"'{target.host}' cannot be reached: {str(error) or type(error).__name__}") from error
    return connection
