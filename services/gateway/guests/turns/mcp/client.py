"""The session with one MCP server: its tools, and calls of them. Blocks; runs on a thread, one call at a time."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from antiphon.services.gateway.guests.turns.mcp.errors import ToolFailedError
from antiphon.services.gateway.guests.turns.mcp.exchange import Lines, exchange
from antiphon.shared import limits
from antiphon.shared.security.outbound import Target
from antiphon.shared.version import __version__

PROTOCOL = "2025-06-18"
"""The version of MCP that is asked for. A server may answer with an earlier one, which is then used."""
_VERSION_CHARS = 40
_SESSION_CHARS = 1024
_NO_SESSION = 404


class Result(NamedTuple):
    """What a tool has returned, as text for the model. `error`: the error of the item if the tool has failed."""

    text: str
    error: dict[str, Any] | None


class McpClient:
    """One session. `headers` are sent with each request. Methods raise ToolFailedError or ResultUnknownError."""

    def __init__(self, lines: Lines, target: Target, headers: Mapping[str, str], call_s: float) -> None:
        self._lines, self._target, self._headers, self._call_s = lines, target, headers, call_s
        self._session = ""
        self._version = ""
        self._number = 0

    def open(self) -> None:
        """Begins the session, unless it has begun."""
        if self._version:
            return
        told = self._ask(
            "initialize",
            {
                "protocolVersion": PROTOCOL,
                "capabilities": {},
                "clientInfo": {"name": "antiphon", "version": __version__},
            },
        )
        version = told.get("protocolVersion")
        if not isinstance(version, str) or not version.isascii() or not 0 < len(version) <= _VERSION_CHARS:
            raise _wrong("names no version of the protocol")
        self._version = version
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        exchange(self._lines, self._target, note, self._all_headers(""), limits.TOOL_LIST_S)

    def tools(self) -> list[dict[str, Any]]:
        """Returns the descriptions of the server's tools, unchecked."""
        self.open()
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            told = self._ask("tools/list", cursor)
            page, more = told.get("tools"), told.get("nextCursor")
            if not isinstance(page, list) or not all(isinstance(one, dict) for one in page):
                raise _wrong("has no list of tools")
            found += page
            if len(found) > limits.TOOLS_LISTED_MAX:
                raise _wrong(f"has more than {limits.TOOLS_LISTED_MAX} tools")
            if not more:
                return found
            if not page or not isinstance(more, str):
                raise _wrong("has a list of tools without end")
            cursor = {"cursor": more}

    def call(self, name: str, arguments: dict[str, Any], key: str) -> Result:
        """Calls a tool. The server gets the key, by which it can know a call that is sent again."""
        self.open()
        params = {"name": name, "arguments": arguments, "_meta": {"antiphon-idempotency-key": key}}
        try:
            told = self._ask("tools/call", params, key)
        except ToolFailedError as error:
            if not (self._session and error.told.get("code") == _NO_SESSION):
                raise
            # The server has forgotten the session, for example in a restart, and has not run the tool.
            self._session = self._version = ""
            self.open()
            told = self._ask("tools/call", params, key)
        blocks = told.get("content", [])
        if not isinstance(blocks, list):
            raise _wrong("has no content")
        text = _text(blocks, told.get("structuredContent"))
        if told.get("isError"):
            return Result(text, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]})
        return Result(text, None)

    def _ask(self, method: str, params: dict[str, Any], key: str = "") -> dict[str, Any]:
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        timeout_s = self._call_s if key else limits.TOOL_LIST_S
        answer, session = exchange(self._lines, self._target, message, self._all_headers(key), timeout_s)
        assert answer is not None
        if session:
            if len(session) > _SESSION_CHARS or not session.isascii() or not session.isprintable():
                raise _wrong("has a session id that cannot be sent back")
            self._session = session
        if (error := answer.get("error")) is not None:
            raise _refused(error)
        result = answer.get("result")
        if not isinstance(result, dict):
            raise _wrong("has no result")
        return result

    def _all_headers(self, key: str) -> dict[str, str]:
        own = {"Mcp-Session-Id": self._session, "MCP-Protocol-Version": self._version, "Idempotency-Key": key}
        return {**self._headers, **{name: value for name, value in own.items() if value}}


def _text(blocks: list[Any], structured: Any) -> str:
    parts = [_block(block) for block in blocks]
    if not parts and structured is not None:
        parts = [msgspec.json.encode(structured).decode()]
    text, most = "\n".join(parts), limits.TOOL_OUTPUT_CHARS_MAX
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[The result has {len(text)} characters. The rest is left out.]"


def _block(block: Any) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return block["text"]
    kind = block.get("type") if isinstance(block, dict) else None
    return f"[content of the type {str(kind)[:40]!r}, which is not shown]"


def _refused(error: Any) -> ToolFailedError:
    given = error if isinstance(error, dict) else {}
    code = given.get("code") if isinstance(given.get("code"), int) else -32603
    message = str(given.get("message") or "no reason given")[:1000]
    told = {"type": "mcp_protocol_error", "code": code, "message": message}
    return ToolFailedError(f"the server has answered with an error: {message}", told)


def _wrong(what: str) -> ToolFailedError:
    message = f"the answer of the server {what}"
    return ToolFailedError(message, {"type": "mcp_protocol_error", "code": -32600, "message": message})
