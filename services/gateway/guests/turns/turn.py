"""Runs one response: lists the tools, then model steps and calls in turn, until the model calls nothing.

The events are the journal. That a call is sent is written and flushed before it is sent, and its result before the
model sees it. A run that continues after another one reads from the events what has happened. If a call was sent and
its result is lost, it is sent again only if its tool is idempotent; otherwise the response ends as incomplete, and the
client can continue it with the result.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request

from antiphon.services.gateway.apis.openai.serving import JournaledSink, Serving
from antiphon.services.gateway.edge.access.call import new_id
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.services.gateway.guests.responses.server_tools import items
from antiphon.services.gateway.guests.responses.server_tools.items import Item
from antiphon.services.gateway.guests.responses.server_tools.seam import StepContext
from antiphon.services.gateway.guests.responses.tools import told_name
from antiphon.services.gateway.guests.turns.encoder import TurnEncoder
from antiphon.services.gateway.guests.turns.journal import progress_of
from antiphon.services.gateway.guests.turns.known import KnownEvents
from antiphon.services.gateway.guests.turns.mcp.client import Result
from antiphon.services.gateway.guests.turns.mcp.errors import ResultUnknownError, ToolFailedError
from antiphon.services.gateway.guests.turns.plan import ServerUse
from antiphon.services.gateway.guests.turns.toolbox import Tool, Toolbox
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.conversation import Turn

_OUT_OF_TOKENS = "max_output_tokens"
_CLIENTS = ("function_call", "custom_tool_call", "local_shell_call", items.ASKED)
"""Items after which the response ends, because the client goes on."""


class StepSink:
    """Receives the events of one model step, which does not end the response."""

    def __init__(self, turn: "TurnRun") -> None:
        self._turn = turn

    async def write(self, data: bytes) -> None:
        """See Sink."""
        await self._turn.write(data)

    async def end(self, data: bytes) -> None:
        """See Sink."""
        await self._turn.write(data)


class TurnRun:
    """See module. Implements `serving.Detached`."""

    def __init__(
        self,
        request: Request,
        serving: Serving,
        encoder: TurnEncoder,
        toolbox: Toolbox,
        *,
        body: ResponsesBody,
        turns: Sequence[Turn],
        approved: Sequence[str],
        context_of: StepContext,
    ) -> None:
        """`body`: that of a model step, without its tools; `turns`: the conversation before the response.

        `approved`: ids of the calls that the client has approved. Raises ServiceError if one of them is not in `turns`.
        """
        self.metrics = serving.metrics
        self._request, self._serving = request, serving
        self._encoder, self._toolbox = encoder, toolbox
        self._body, self._turns, self._context_of = body, turns, context_of
        self._approved = {one: _call_of(turns, one) for one in approved}
        self._sink: JournaledSink | None = None
        self._known: KnownEvents | None = None
        self._sent: int | None = None
        self._step = 0

    async def detached(self, sink: JournaledSink) -> None:
        """Runs the response to its end, from where the events of earlier runs end. Raises ServiceError."""
        self._sink = sink
        await self._restore(sink.shown())
        await self._list_tools()
        while True:
            if not await self._make_calls():
                await self._end(items.UNKNOWN)
                return
            if self._waits_for_client():
                await self._end()
                return
            reason = await self._next_step()
            if reason is not None:
                await self._end(reason)
                return

    async def write(self, data: bytes) -> None:
        """Writes events, without those that an earlier run has written."""
        if self._known is not None:
            data = self._known.rest(data)
            if self._known.is_over:
                self._encoder.number_from(self._known.next_number)
                self._known = None
        if data:
            await self._journal.write(data)

    # --- inside ---

    @property
    def _journal(self) -> JournaledSink:
        assert self._sink is not None
        return self._sink

    async def _restore(self, events: Sequence[bytes]) -> None:
        progress = progress_of(events)
        self._encoder.restore(progress)
        self._toolbox.take(progress.items)
        self._sent = progress.sent
        self._step = max([items.step_of(item) for item in progress.items if item["type"] == items.CALL], default=0)
        self._encoder.number_from(len(events))
        if len(events) > progress.num_events:
            self._known = KnownEvents(events[progress.num_events :], len(events))
        if not progress.has_begun:
            await self.write(self._encoder.begun())

    async def _end(self, reason: str = "") -> None:
        """Writes the end. `reason`: why the response is incomplete; empty: it is complete."""
        data = self._encoder.ended(reason)
        await self._journal.end(data if self._known is None else self._known.rest(data))

    # --- tools ---

    async def _list_tools(self) -> None:
        """Lists the tools of all servers. Raises ServiceError if one cannot: then the response fails."""
        known = [item for item in self._encoder.items if item["type"] == items.LIST]
        for number, server in enumerate(self._toolbox.servers):
            item = known[number] if number < len(known) else await self._listed(server, number)
            if item["error"] is not None:
                raise ServiceError(
                    "invalid_value",
                    f"The tools of the MCP server '{server.label}' cannot be read: {item['error']}.",
                    param="tools",
                )
            self._toolbox.add(server, item["tools"])

    async def _listed(self, server: ServerUse, number: int) -> Item:
        item: Item = {"id": f"mcpl_{self._request.state.request_id}_out{number}", "type": items.LIST}
        item |= {"server_label": server.label, "tools": [], "error": None}
        await self.write(self._encoder.list_begins(item))
        try:
            item = {**item, "tools": await self._toolbox.listed(server)}
        except ToolFailedError as error:
            item = {**item, "error": str(error)}
        await self.write(self._encoder.list_ended(item))
        return item

    async def _make_calls(self) -> bool:
        """Makes the calls that are announced. Returns False if the result of one of them stays unknown."""
        if self._approved and not self._calls():
            for name, (function, arguments) in self._approved.items():
                tool = self._toolbox.find(function)
                label, _, bare = (tool.label, "", tool.name) if tool is not None else function.partition("__")
                await self.write(self._encoder.announced_call(label, bare, arguments, 0, approved=name))
        made = 0
        for number, item in enumerate(self._encoder.items):
            if item["type"] != items.CALL:
                continue
            made += 1
            if item["status"] == "in_progress" and not await self._make(number, item, made):
                return False
        return True

    async def _make(self, number: int, item: Item, count: int) -> bool:
        """Makes one call. Returns False if its result stays unknown. `count`: its place among all calls, from 1."""
        was_sent, self._sent = number == self._sent, None
        tool = self._toolbox.find(told_name(item["name"], item["server_label"]))
        if was_sent and (tool is None or not tool.is_idempotent):
            # Whatever an earlier run has written of the end of the call: its result is not there.
            if self._known is not None:
                self._encoder.number_from(self._known.next_number)
                self._known = None
            return await self._unknown(number, "the gateway that made the call has ended")
        try:
            result = await self._result(number, item, tool, count)
        except ToolFailedError as error:
            await self._ended(number, Result("", error.told))
        except ResultUnknownError as error:
            return await self._unknown(number, str(error))
        else:
            await self._ended(number, result)
        return True

    async def _result(self, number: int, item: Item, tool: Tool | None, count: int) -> Result:
        """Sends a call, after it is in the journal, and returns its result.

        Raises ToolFailedError or ResultUnknownError.
        """
        failure: ToolFailedError | None = None
        arguments: Any = None
        try:
            arguments = _arguments(item["arguments"])
            if tool is None:
                raise ToolFailedError("the server has no such tool, or the request does not allow it")
            if count > self._calls_max:
                raise ToolFailedError(f"the response has made its {self._calls_max} calls of tools")
            await self._toolbox.ready(tool)
        except ToolFailedError as error:
            failure = error
        await self.write(self._encoder.call_begins(number))
        if failure is not None or tool is None:
            raise failure or AssertionError
        await self._journal.flush()
        key = item["approval_request_id"] or item["id"]
        return await self._toolbox.call(tool, arguments, key)

    async def _ended(self, number: int, result: Result) -> None:
        status, output = ("completed", result.text) if result.error is None else ("failed", None)
        await self.write(self._encoder.call_ended(number, status, output=output, error=result.error))
        await self._journal.flush()

    async def _unknown(self, number: int, why: str) -> bool:
        message = f"The result of the call is not known: {why}."
        error = {"type": "mcp_protocol_error", "code": -32000, "message": message}
        await self.write(self._encoder.call_ended(number, "incomplete", output=None, error=error))
        return False

    def _calls(self) -> list[Item]:
        return [item for item in self._encoder.items if item["type"] == items.CALL]

    @property
    def _calls_max(self) -> int:
        return min(self._body.max_tool_calls or limits.TURN_CALLS_MAX, limits.TURN_CALLS_MAX)

    def _waits_for_client(self) -> bool:
        """Whether the last model step has called something that is the client's."""
        parts = items.steps(self._encoder.items)
        return bool(parts) and any(item["type"] in _CLIENTS for item in parts[-1])

    # --- model steps ---

    async def _next_step(self) -> str | None:
        """Runs a model step. Returns None if calls follow; else why the response is incomplete, empty: it is not."""
        body = self._step_body(self._step + 1)
        if body is None:
            return _OUT_OF_TOKENS
        self._step += 1
        turns = items.conversation(self._turns, self._encoder.items)
        context = self._context_of(body, turns)
        # Engines know each run of a step by an id of its own: an earlier run may not have ended there.
        context = replace(context, stream=True, request=replace(context.request, request_id=new_id()))
        self._encoder.begin_step(context, self._step)
        num_calls, num_items = len(self._calls()), len(self._encoder.items)
        await self._serving.runner(self._request, context, self._encoder).detached(StepSink(self))
        if self._encoder.was_cut_off:
            return _OUT_OF_TOKENS
        await self.write(self._encoder.announced())
        asked = any(item["type"] == items.ASKED for item in self._encoder.items[num_items:])
        return None if len(self._calls()) > num_calls or asked else ""

    def _step_body(self, number: int) -> ResponsesBody | None:
        """Returns the body of a model step; None if no tokens are left for it."""
        body, used = self._body, (self._encoder.usage or {}).get("output_tokens", 0)
        left = None if body.max_output_tokens is None else body.max_output_tokens - used
        if left is not None and left <= 0:
            return None
        choice = body.tool_choice
        if number > 1 and body.max_tool_calls is None:
            choice = _unforced(choice)
        if len(self._calls()) >= self._calls_max or number >= limits.TURN_STEPS_MAX:
            choice = "none"
        tools = [*(body.tools or ()), *self._toolbox.functions]
        return replace(
            body,
            tools=tools,
            tool_choice=self._choice(choice) if tools else None,
            max_output_tokens=left,
        )

    def _choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Returns a choice with the functions of the model in place of a server's tools."""
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "mcp":
            return _named(choice, self._toolbox.functions)
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            return {**choice, "tools": [each for one in choice["tools"] for each in self._allowed(one)]}
        return choice

    def _allowed(self, tool: Any) -> list[Any]:
        if not isinstance(tool, dict) or tool.get("type") != "mcp":
            return [tool]
        named = _named(tool, self._toolbox.functions)
        return named["tools"] if named["type"] == "allowed_tools" else [named]


def _named(choice: dict[str, Any], functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the choice of one function for one tool of a server, or of all functions for the whole server."""
    label, name = str(choice.get("server_label")), choice.get("name")
    if name is not None:
        return {"type": "function", "name": told_name(str(name), label)}
    own = [one["name"] for one in functions if one["name"].startswith(told_name("", label))]
    if not own:
        refuse("tool_choice", f"names the MCP server '{label}', which has no tools in this request")
    return {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": one} for one in own],
    }


def _unforced(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Returns the choice for the steps after the first one: one that forces a call would force calls without end."""
    if choice in (None, "auto", "none"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return {**choice, "mode": "auto"}
    return "auto"


def _call_of(turns: Sequence[Turn], name: str) -> tuple[str, str]:
    """Returns the function and the arguments of an earlier call. Raises ServiceError if there is none of this id."""
    for turn in turns:
        for call in turn.tool_calls or ():
            if call.id == name and call.function is not None:
                given = call.function.arguments
                text = given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()
                return call.function.name, text
    refuse("input", f"approves the call '{name[:100]}', which is in no earlier item")


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ToolFailedError("the arguments are not the text of a JSON object")
    return found
