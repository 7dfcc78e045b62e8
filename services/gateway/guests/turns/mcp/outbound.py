"""Which MCP servers a client may name, and the connection to one.

The operator's servers may be anywhere. The host of a URL from a client must be on the operator's list, and its
addresses must be public (`antiphon.shared.security.outbound`). Redirects are never followed. Runs on a thread.
"""

import http.client
from collections.abc import Callable, Collection

from antiphon.services.gateway.guests.turns.mcp.errors import ToolFailedError
from antiphon.shared.request.checks import refuse
from antiphon.shared.security import outbound
from antiphon.shared.security.outbound import PORTS, PrivateAddressError, Target, target_of
from antiphon.shared.security.public_addresses import Resolve, is_listed, is_public, resolve


def stranger(url: str, allowed: Collection[str], param: str) -> Target:
    """Returns the target of a client's URL. Raises ServiceError that names `param`."""
    try:
        target = target_of(url)
    except ValueError as error:
        refuse(param, str(error))
    if not is_listed(target.host.lower(), allowed):
        refuse(
            param,
            f"names the host '{target.host[:100]}', which is not allowed: have the server started with "
            "--allowed-mcp-hosts, or use a server that the operator has configured (--mcp-servers)",
        )
    if target.port != PORTS[target.scheme]:
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
        return outbound.connected(target, deadline, may_connect, addresses_of)
    except PrivateAddressError as error:
        raise ToolFailedError(str(error)) from error
    except OSError as error:
        raise ToolFailedError(f"'{target.host}' cannot be reached: {str(error) or type(error).__name__}") from error
