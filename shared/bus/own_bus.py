"""The bus of this user's `antiphon serve`: where it listens, and whether the server there is the user's own.

Its address is a file, `--nats file:///…/bus.url`, which only this user can read and write. The launcher writes another
port to it when somebody else has taken the port of a bus that ended, so clients read it for each connection.

A port says nothing about who listens there, but the kernel does. A client looks up the server's end of the connection
after the server's first line, which shows that the connection was accepted, and before it sends anything.
"""

import os
import sys
from pathlib import Path
from urllib.parse import ParseResult, unquote, urlparse

from nats import errors

from antiphon.shared.security.socket_users import Address, user_name, user_of_end


class ForeignServerError(errors.Error):
    """The process that listens at the bus's address is another user's, or its user is unknown."""


class OwnBus:
    """The bus whose address is in the file that `url` names."""

    def __init__(self, url: str) -> None:
        self._path = Path(unquote(urlparse(url).path))

    def address(self) -> ParseResult:
        """Returns the present URL of the server. Raises OSError."""
        return urlparse(self._path.read_text(encoding="ascii").strip())

    def check(self, server: Address, client: Address) -> None:
        """Checks the other end of a connection on which the server has sent something. Raises ForeignServerError."""
        if sys.platform != "linux":  # other kernels do not tell
            return
        uid = user_of_end(server, client)
        if uid != os.geteuid():
            who = "nobody that is known" if uid is None else f"the user {user_name(uid)}"
            raise ForeignServerError(f"the server at {server[0]}:{server[1]} belongs to {who} and is told nothing")


def own_bus(urls: list[str]) -> OwnBus | None:
    """Returns the bus of this user's launcher if the URLs name one."""
    return OwnBus(urls[0]) if urls and urlparse(urls[0]).scheme == "file" else None
