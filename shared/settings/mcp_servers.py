"""The operator's file of MCP servers (`--mcp-servers`): read when a gateway starts."""

import math
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from antiphon.shared import limits
from antiphon.shared.flags import SettingsError

_FLAG = "--mcp-servers"


class McpServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server. It may be in a private network: the operator names it, not a client."""

    url: str
    headers: dict[str, str] = {}
    """Sent with each request, such as `Authorization`. No client sees them."""
    allowed_tools: list[str] | None = None
    """The tools that models may use; None: all."""
    idempotent_tools: list[str] = []
    """Tools that may be called again with the same key if a result is lost, whatever the server says of them."""
    timeout_s: float = limits.TOOL_CALL_S
    """Time limit of one call, seconds."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    servers: dict[str, McpServer]


def read_mcp_servers(path: str) -> dict[str, McpServer]:
    """Returns the servers of a file by name; none if `path` is empty. Raises SettingsError."""
    if not path:
        return {}
    try:
        with Path(path).open("rb") as file:
            data = file.read(limits.TOOL_SERVERS_FILE_BYTES_MAX + 1)
        if len(data) > limits.TOOL_SERVERS_FILE_BYTES_MAX:
            raise SettingsError(f"{_FLAG}: {path} has more than {limits.TOOL_SERVERS_FILE_BYTES_MAX} bytes.")
        servers = msgspec.json.decode(data, type=_File).servers
    except OSError as error:
        raise SettingsError(f"{_FLAG}: {path} cannot be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise SettingsError(
            f'{_FLAG}: {path} must have JSON such as {{"servers": {{"files": {{"url": "…"}}}}}}: {error}.'
        ) from error
    for name, server in servers.items():
        _check(f"{_FLAG}: {path}: the server {name!r}", server)
    return servers


def _check(where: str, server: McpServer) -> None:
    try:
        parts = urlsplit(server.url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:
        good = False
    if not good:
        raise SettingsError(f"{where} must have a URL with http or https, a host, and no user name.")
    if not (math.isfinite(server.timeout_s) and 0 < server.timeout_s <= limits.TOOL_CALL_S_MAX):
        raise SettingsError(f"{where} must have a timeout_s above 0 and at most {limits.TOOL_CALL_S_MAX:g}.")
    for name, value in server.headers.items():
        if not (name.isascii() and name.replace("-", "").isalnum() and value.isprintable() and value.isascii()):
            raise SettingsError(f"{where} has a header {name!r} that cannot be sent: use printable ASCII characters.")
