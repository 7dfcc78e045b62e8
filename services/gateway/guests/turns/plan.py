"""Reads the tools of a request that the server runs. Pure, but for the operator's servers."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.services.gateway.guests.responses.schemas import LOGPROBS, ResponsesBody
from antiphon.services.gateway.guests.turns.mcp.outbound import stranger
from antiphon.shared import limits
from antiphon.shared.request.checks import missing, refuse
from antiphon.shared.security.outbound import Target, target_of
from antiphon.shared.settings.mcp_servers import McpServer

TYPE = "mcp"
_FIELDS = (
    "type", "server_label", "server_url", "connector_id", "allowed_tools", "require_approval",
    "headers", "authorization",
)  # fmt: skip
_NO_EFFECT = {"defer_loading": None, "allowed_callers": None, "tunnel_id": None}
_SECRET = ("headers", "authorization")
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")
_OWN_HEADERS = frozenset(
    (
        *("accept", "accept-encoding", "connection", "content-length", "content-type", "expect", "host"),
        *("idempotency-key", "mcp-protocol-version", "mcp-session-id", "te", "trailer", "transfer-encoding", "upgrade"),
    )
)
_ALWAYS, _NEVER = "always", "never"


class Filter(NamedTuple):
    """Which tools are meant: those with these names, and of those the ones that only read. None: all."""

    names: frozenset[str] | None = None
    only_reading: bool = False

    def has(self, tool: Mapping[str, Any]) -> bool:
        """Whether a tool of a server's list is meant."""
        if self.names is not None and tool["name"] not in self.names:
            return False
        return not self.only_reading or bool((tool.get("annotations") or {}).get("readOnlyHint"))


class ServerUse(NamedTuple):
    """How a request uses one server. `label`: the request's name for it."""

    label: str
    target: Target
    headers: Mapping[str, str]
    call_s: float
    allowed: Sequence[Filter]
    """A tool must be in all of them."""
    never_asks: Filter | None
    always_asks: Filter | None
    idempotent: frozenset[str]

    def allows(self, tool: Mapping[str, Any]) -> bool:
        """Whether the model may have a tool of the server's list."""
        return all(one.has(tool) for one in self.allowed)

    def asks(self, tool: Mapping[str, Any]) -> bool:
        """Whether the client has to approve each call of a tool. By default it has, as in OpenAI's API."""
        if self.always_asks is not None and self.always_asks.has(tool):
            return True
        return self.never_asks is None or not self.never_asks.has(tool)


def has_server_tools(body: ResponsesBody) -> bool:
    """Whether a request has a tool that the server runs."""
    return any(isinstance(tool, dict) and tool.get("type") == TYPE for tool in body.tools or ())


def uses(body: ResponsesBody, servers: Mapping[str, McpServer], allowed_hosts: Collection[str]) -> list[ServerUse]:
    """Returns the servers of a request. Raises ServiceError that names the wrong field."""
    found: list[ServerUse] = []
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type") == TYPE:
            found.append(_use(tool, f"tools[{number}]", servers, allowed_hosts))
    if len(found) > limits.TOOL_SERVERS_MAX:
        refuse("tools", f"must name at most {limits.TOOL_SERVERS_MAX} MCP servers")
    if len({one.label for one in found}) < len(found):
        refuse("tools", "must have a different 'server_label' for each MCP server")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        refuse("max_tool_calls", "must be at least 1")
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        refuse("include", f"cannot have '{LOGPROBS}' together with tools of the type 'mcp'")
    return found


def shown(body: ResponsesBody) -> ResponsesBody:
    """Returns the body as a response shows it: without what authorizes at a server."""
    tools = [
        {name: value for name, value in tool.items() if name not in _SECRET} if tool.get("type") == TYPE else tool
        for tool in body.tools or ()
    ]
    return replace(body, tools=tools)


def own_tools(body: ResponsesBody) -> list[dict[str, Any]]:
    """Returns the tools that the client runs."""
    return [tool for tool in body.tools or () if tool.get("type") != TYPE]


def _use(tool: dict[str, Any], path: str, servers: Mapping[str, McpServer], hosts: Collection[str]) -> ServerUse:
    check_fields(tool, _FIELDS, path, _NO_EFFECT)
    label = tool.get("server_label")
    if label is None:
        missing(f"{path}.server_label")
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        refuse(f"{path}.server_label", "must be a letter and up to 31 further letters, digits, '_' or '-'")
    given = _headers(tool, path)
    asks = tool.get("require_approval", _ALWAYS)
    never, always = _approvals(asks, f"{path}.require_approval")
    allowed = [_filter(tool.get("allowed_tools"), f"{path}.allowed_tools")]
    url = tool.get("server_url")
    if url is not None:
        if not isinstance(url, str):
            refuse(f"{path}.server_url", "must be a string")
        target, call_s, known = stranger(url, hosts, f"{path}.server_url"), limits.TOOL_CALL_S, frozenset[str]()
    else:
        server = _configured(tool, label, path, servers)
        target, call_s, known = (
            target_of(server.url)._replace(only_public=False),
            server.timeout_s,
            frozenset(server.idempotent_tools),
        )
        given = {**given, **server.headers}
        if server.allowed_tools is not None:
            allowed.append(Filter(frozenset(server.allowed_tools)))
    return ServerUse(label, target, given, call_s, allowed, never, always, known)


def _configured(tool: Mapping[str, Any], label: str, path: str, servers: Mapping[str, McpServer]) -> McpServer:
    field = "server_label" if tool.get("connector_id") is None else "connector_id"
    server = servers.get(str(tool.get("connector_id") or label))
    if server is None:
        names = ", ".join(map(repr, sorted(servers))) or "none"
        refuse(f"{path}.{field}", f"names no MCP server of the operator (there are: {names}); or send 'server_url'")
    return server


def _headers(tool: Mapping[str, Any], path: str) -> dict[str, str]:
    given = tool.get("headers") or {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        refuse(f"{path}.headers", "must be an object whose values are strings")
    for name, value in given.items():
        if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS or not _is_sendable(value):
            refuse(f"{path}.headers", f"has a header that cannot be sent: {name[:40]!r}")
    token = tool.get("authorization")
    if token is None:
        return given
    if not isinstance(token, str) or not _is_sendable(token):
        refuse(f"{path}.authorization", "must be a token of printable ASCII characters")
    return {**given, "Authorization": f"Bearer {token}"}


def _is_sendable(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _approvals(asks: Any, path: str) -> tuple[Filter | None, Filter | None]:
    """Returns the tools that are called without approval, and those that never are."""
    if asks in (None, _ALWAYS):
        return None, None
    if asks == _NEVER:
        return Filter(), None
    if not isinstance(asks, dict):
        refuse(path, "must be 'always', 'never' or an object with filters")
    check_fields(asks, (_ALWAYS, _NEVER), path)
    never, always = asks.get(_NEVER), asks.get(_ALWAYS)
    return (
        None if never is None else _filter(never, f"{path}.{_NEVER}"),
        None if always is None else _filter(always, f"{path}.{_ALWAYS}"),
    )


def _filter(given: Any, path: str) -> Filter:
    if given is None:
        return Filter()
    if isinstance(given, dict):
        check_fields(given, ("tool_names", "read_only"), path)
        names, only_reading = given.get("tool_names"), given.get("read_only", False)
    else:
        names, only_reading = given, False
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        _bad_filter(path)
    if not isinstance(only_reading, bool):
        _bad_filter(path)
    return Filter(None if names is None else frozenset(names), only_reading)


def _bad_filter(path: str) -> NoReturn:
    refuse(path, "must be a list of names of tools, or an object with 'tool_names' and 'read_only'")
