"""Reads from the events of a response how far it has come. Pure.

A response consists of parts: each list of tools, each model step with the announcement of its calls, each call. A part
that was interrupted is run again from its beginning; a part that has ended is known from its items.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.services.gateway.guests.responses.server_tools.items import CALL, LIST, Item
from antiphon.services.gateway.guests.turns.known import told_by

CALL_BEGINS = f"response.{CALL}.in_progress"
"""The event that is written before a call is sent."""


@dataclass(kw_only=True)
class Progress:
    """`items`: those of the parts that have ended, and the announced calls. `num_events`: the events until then."""

    items: list[Item] = field(default_factory=list[Item])
    num_events: int = 0
    has_begun: bool = False
    """Whether the response is in progress."""
    sent: int | None = None
    """Number of the call that was sent and whose result is not known."""
    usage: dict[str, Any] | None = None
    """Of the model steps that have ended."""


def progress_of(events: Sequence[bytes]) -> Progress:
    """Returns how far a response has come after these events."""
    found = Progress()
    items: list[Item] = []
    for number, event in enumerate(events):
        told = told_by(event)
        match told["type"]:
            case "response.created" | "response.queued" | "response.in_progress":
                found.num_events = number + 1
                found.has_begun = told["type"] == "response.in_progress"
            case "response.output_item.added":
                items.append(told["item"])
            case "response.mcp_call_arguments.done":
                items[told["output_index"]] = {**items[told["output_index"]], "arguments": told["arguments"]}
            case "response.output_item.done":
                items[told["output_index"]] = told["item"]
                if told["item"]["type"] in (CALL, LIST):
                    found.items, found.num_events, found.sent = list(items), number + 1, None
            case "response.mcp_call.in_progress":
                found.items, found.num_events = list(items), number
                found.sent, found.usage = told["output_index"], told.get("usage")
            case _:
                pass
    return found
