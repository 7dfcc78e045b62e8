"""Encodes a response of several model steps, between which the server calls tools. Pure.

The calls of a model step are announced together when the step has ended, because only one item of the model's is open
at a time. So the events never tell of a call of which the whole step is not known.
"""

from typing import Any

from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.apis.parsers.events import CallArguments, CallStart, Event
from antiphon.services.gateway.guests.responses.encoder import ResponseEncoder
from antiphon.services.gateway.guests.responses.response_object import ResponseObject, usage
from antiphon.services.gateway.guests.responses.server_tools.items import ASKED, CALL, Item, item_id
from antiphon.services.gateway.guests.turns.journal import CALL_BEGINS, Progress
from antiphon.services.gateway.guests.turns.toolbox import Tool, Toolbox


class TurnEncoder(ResponseEncoder):
    """See module. One object encodes all steps; `begin_step` comes before each."""

    def __init__(self, described: ResponseObject, context: RequestContext, toolbox: Toolbox, *, waits: bool) -> None:
        """`waits`: whether clients see that the response is queued: it runs in the background."""
        super().__init__(described, context)
        self.was_cut_off = False
        """Whether the model step has reached the limit of its tokens."""
        self.usage: dict[str, Any] | None = None
        """Tokens of all model steps so far."""
        self._turn_id = context.request.request_id
        self._toolbox, self._waits = toolbox, waits
        self._step = 0
        self._calls: dict[int, tuple[Tool, list[str]]] = {}
        """The calls of the step that the server makes, and the parts of their arguments, by the index of the call."""

    @property
    def items(self) -> list[Item]:
        """The items of the output so far."""
        return self._output.items

    def restore(self, progress: Progress) -> None:
        """Sets the state that an earlier run of the response had. Called once, before other methods."""
        for item in progress.items:
            self._output.put(item)
        self.usage = progress.usage
        if progress.has_begun:
            self._set("in_progress")

    # --- the response ---

    def queued(self) -> bytes:
        """See ResponseEncoder. A response whose client waits for it begins at once."""
        if self._waits:
            return super().queued()
        created = self._event("response.created")
        return created + self.begun()

    def begun(self) -> bytes:
        """Returns the event of a response that begins to run."""
        self._set("in_progress")
        return self._event("response.in_progress")

    def ended(self, reason: str = "") -> bytes:
        """Returns the event of the end. `reason`: why the response is incomplete; empty: it is complete."""
        status = "incomplete" if reason else "completed"
        self._set(status, usage=self.usage, reason=reason)
        return self._event(f"response.{status}")

    # --- a model step ---

    def begin_step(self, context: RequestContext, number: int) -> None:
        """A model step begins; they are numbered from 1."""
        self._context, self._step, self._calls, self.was_cut_off = context, number, {}, False

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder. A step has no events of its own."""
        return b""

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder. Ends the model's own item, not the response."""
        self.was_cut_off = state.accumulator.choices[0].finish_reason == "length"
        self.usage = _sum(self.usage, usage(state))
        return self._output.close("incomplete" if self.was_cut_off else "completed")

    def announced(self) -> bytes:
        """Returns the events of the calls of the step that the server makes, or asks the client to approve."""
        return b"".join(self._announced(tool, "".join(parts)) for tool, parts in self._calls.values())

    def _announced(self, tool: Tool, arguments: str) -> bytes:
        if not tool.asks:
            return self.announced_call(tool.label, tool.name, arguments or "{}", self._step)
        item = self._described(ASKED, tool.label, tool.name, arguments or "{}", self._step)
        return self._added(item) + self.item_done(self._output.put(item), item)

    def _event_of(self, event: Event, choice: Choice) -> bytes:
        match event:
            case CallStart(call, name) if (tool := self._toolbox.find(name)) is not None:
                self._calls[call] = (tool, [])
                return self._output.close("completed")
            case CallArguments(call, text) if call in self._calls:
                self._calls[call][1].append(text)
                return b""
            case _:
                return super()._event_of(event, choice)

    def _call_id(self, call: int, name: str) -> str:
        answer = self._context.answer_format
        assert answer is not None
        return answer.call_id(f"{self._turn_id}/{self._step}", 0, call, name)

    # --- items of the server's ---

    def announced_call(self, label: str, name: str, arguments: str, step: int, approved: str | None = None) -> bytes:
        """Returns the events of a call that will be made. `approved`: id of the question that the client answered."""
        item = self._described(CALL, label, name, arguments, step)
        item |= {"approval_request_id": approved, "output": None, "error": None, "status": "in_progress"}
        added = self._added({**item, "arguments": ""})
        place = {"item_id": item["id"], "output_index": self._output.put(item)}
        emit = self._events.event
        delta = emit("response.mcp_call_arguments.delta", **place, delta=arguments)
        return added + delta + emit("response.mcp_call_arguments.done", **place, arguments=arguments)

    def call_begins(self, number: int) -> bytes:
        """Returns the event that is written before a call is sent. It has the tokens of all steps until then."""
        return self._events.event(CALL_BEGINS, **self._place(number), usage=self.usage)

    def call_ended(self, number: int, status: str, **fields: Any) -> bytes:
        """Returns the events of a call's end: `completed`, `failed` or, without a known result, `incomplete`."""
        item = {**self.items[number], **fields, "status": status}
        told = b"" if status == "incomplete" else self._events.event(f"response.{CALL}.{status}", **self._place(number))
        self._output.replace(number, item)
        return told + self.item_done(number, item)

    def list_begins(self, item: Item) -> bytes:
        """Returns the events before a server is asked for its tools."""
        number = len(self.items)
        added = self._added(item)
        place = {"item_id": item["id"], "output_index": number}
        return added + self._events.event("response.mcp_list_tools.in_progress", **place)

    def list_ended(self, item: Item) -> bytes:
        """Returns the events after a server was asked for its tools."""
        number = self._output.put(item)
        what = "completed" if item["error"] is None else "failed"
        told = self._events.event(f"response.mcp_list_tools.{what}", **self._place(number))
        return told + self.item_done(number, item)

    def item_done(self, number: int, item: Item) -> bytes:
        """Returns the event of an item that has ended."""
        return self._events.event("response.output_item.done", output_index=number, item=item)

    def _added(self, item: Item) -> bytes:
        return self._events.event("response.output_item.added", output_index=len(self.items), item=item)

    def _described(self, kind: str, label: str, name: str, arguments: str, step: int) -> Item:
        name_of = item_id(kind, self._turn_id, step, len(self.items))
        return {"id": name_of, "type": kind, "server_label": label, "name": name, "arguments": arguments}

    def _place(self, number: int) -> dict[str, Any]:
        return {"item_id": self.items[number]["id"], "output_index": number}


def _sum(first: dict[str, Any] | None, then: dict[str, Any]) -> dict[str, Any]:
    if first is None:
        return then
    return {
        name: _sum(first.get(name), value) if isinstance(value, dict) else value + (first.get(name) or 0)
        for name, value in then.items()
    }
