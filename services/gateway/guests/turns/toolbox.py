"""The tools of one response: lists them, calls them on threads, and knows which calls may be made again."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import msgspec

from antiphon.services.gateway.guests.responses.tools import told_name
from antiphon.services.gateway.guests.turns.mcp.client import McpClient, Result
from antiphon.services.gateway.guests.turns.mcp.errors import ResultUnknownError, ToolFailedError
from antiphon.services.gateway.guests.turns.mcp.exchange import Lines
from antiphon.services.gateway.guests.turns.plan import ServerUse
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import check_nesting
from antiphon.shared.request.tools import is_tool_name

T = TypeVar("T")
_RETRY_S = 0.3
"""Pause before an idempotent call is sent again, seconds; twice as long after each further failure."""
_ANNOTATIONS = ("title", "readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")


class Tool(NamedTuple):
    """One tool of a server. `asks`: the client approves each call. `is_idempotent`: a call may be sent again."""

    label: str
    name: str
    asks: bool
    is_idempotent: bool


class Toolbox:
    """See module. `servers`: those of the request; `threads` run what blocks."""

    def __init__(self, servers: Sequence[ServerUse], threads: Executor, lines: Lines) -> None:
        self.servers = servers
        self.functions: list[dict[str, Any]] = []
        """The tools as functions for the model, in the form of the API."""
        self._threads = threads
        self._clients = {one.label: McpClient(lines, one.target, one.headers, one.call_s) for one in servers}
        self._bytes_left = limits.TURN_BYTES_MAX
        self._tools: dict[str, Tool] = {}
        """By the name that the model knows."""

    def find(self, function: str) -> Tool | None:
        """Returns the tool for which a function of the model stands; None if the client runs the function."""
        return self._tools.get(function)

    def take(self, held: Any) -> bool:
        """Counts what the response has from tools. Returns False if there is no room for it: then it is not counted."""
        size = len(msgspec.json.encode(held))
        if size > self._bytes_left:
            return False
        self._bytes_left -= size
        return True

    async def listed(self, server: ServerUse) -> list[dict[str, Any]]:
        """Returns the tools of a server that the request may use, as an item has them. Raises ToolFailedError."""
        try:
            given = await self._run(self._clients[server.label].tools)
        except ResultUnknownError as error:
            raise ToolFailedError(f"the server does not answer: {error}") from error
        tools = [_checked(one, server.label) for one in given]
        if len({one["name"] for one in tools}) < len(tools):
            raise ToolFailedError("the server has two tools of the same name")
        allowed = [one for one in tools if server.allows(one)]
        if not self.take(allowed):
            raise _no_room()
        return allowed

    def add(self, server: ServerUse, tools: Sequence[Mapping[str, Any]]) -> None:
        """Offers the model the tools of an item: of a list that was just read, or that the journal has."""
        for one in tools:
            function = told_name(one["name"], server.label)
            hints = one.get("annotations") or {}
            again = one["name"] in server.idempotent or bool(hints.get("idempotentHint") or hints.get("readOnlyHint"))
            self._tools[function] = Tool(server.label, one["name"], server.asks(one), again)
            described = {"description": one["description"]} if one.get("description") else {}
            self.functions.append(
                {"type": "function", "name": function, "parameters": one["input_schema"], **described}
            )

    async def ready(self, tool: Tool) -> None:
        """Begins the session with a tool's server, so that a call only has to be sent. Raises ToolFailedError."""
        try:
            await self._run(self._clients[tool.label].open)
        except ResultUnknownError as error:
            raise ToolFailedError(f"the server does not answer: {error}") from error

    async def call(self, tool: Tool, arguments: dict[str, Any], key: str) -> Result:
        """Makes a call. An idempotent one is sent again, with the same key, if its answer is lost.

        Raises ToolFailedError, or ResultUnknownError for a call that may have been made.
        """
        for attempt in range(limits.TOOL_TRIES):
            try:
                result = await self._run(lambda: self._clients[tool.label].call(tool.name, arguments, key))
                if not self.take(result):
                    raise _no_room()
                return result
            except ResultUnknownError as error:
                if not tool.is_idempotent:
                    raise
                if attempt + 1 == limits.TOOL_TRIES:
                    raise ToolFailedError(f"the server does not answer: {error}") from error
            await asyncio.sleep(_RETRY_S * 2**attempt)
        raise AssertionError

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _no_room() -> ToolFailedError:
    return ToolFailedError(f"the tools of one response may tell {limits.TURN_BYTES_MAX} bytes together")


def _checked(tool: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Returns a server's description of a tool as an item has it. Raises ToolFailedError."""
    name, schema = tool.get("name"), tool.get("inputSchema")
    if not isinstance(name, str) or not is_tool_name(told_name(name, label)):
        raise ToolFailedError(f"the server has a tool whose name cannot be used: {str(name)[:80]!r}")
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise ToolFailedError(f"the server has no schema of an object for the arguments of {name!r}")
    try:
        check_nesting(schema, name)
    except ServiceError as error:
        raise ToolFailedError(f"the schema of a tool cannot be used: {error.message}") from error
    described, hints = tool.get("description"), tool.get("annotations")
    kept = {one: hints[one] for one in _ANNOTATIONS if one in hints} if isinstance(hints, dict) else None
    return {
        "name": name,
        "description": described if isinstance(described, str) else None,
        "input_schema": schema,
        "annotations": kept,
    }
