"""Rebuilds a response from its events, for gateways that do not run it. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.guests.responses.response_object import FINAL, error_object
from antiphon.shared.errors import ServiceError

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_DATA = b"\n" + sse.DATA


def response_of(events: Sequence[bytes]) -> dict[str, Any]:
    """Returns the response after these events. `events` must begin with the first event of the response."""
    response: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    for event in events:
        told: dict[str, Any] = _decode(event.partition(_DATA)[2])
        if "response" in told:
            response = told["response"]
        else:
            _add(items, told)
    return response if response["status"] in FINAL else {**response, "output": items}


def cancelled_of(events: Sequence[bytes]) -> dict[str, Any]:
    """Returns the response if it is cancelled after these events."""
    return _ended(events, "cancelled", None)


def failure_of(events: Sequence[bytes], error: ServiceError) -> bytes:
    """Returns the event of a response that fails after these events."""
    response = _ended(events, "failed", error)
    data = {"type": "response.failed", "sequence_number": len(events), "response": response}
    return sse.named_event(b"response.failed", _encode(data))


def _ended(events: Sequence[bytes], status: str, error: ServiceError | None) -> dict[str, Any]:
    response = response_of(events)
    items = [
        {**item, "status": "incomplete"} if item.get("status") == "in_progress" else item for item in response["output"]
    ]
    return {**response, "status": status, "output": items, "error": None if error is None else error_object(error)}


def _add(items: list[dict[str, Any]], told: dict[str, Any]) -> None:
    """Applies an event to the output items."""
    match told["type"]:
        case "response.output_item.added":
            items.append(told["item"])
        case "response.output_item.done":
            items[told["output_index"]] = told["item"]
        case "response.content_part.added":
            items[told["output_index"]]["content"].append(told["part"])
        case "response.output_text.delta":
            part = items[told["output_index"]]["content"][told["content_index"]]
            part["text"] += told["delta"]
            part["logprobs"] += told["logprobs"]
        case "response.reasoning_summary_part.added":
            items[told["output_index"]]["summary"].append(told["part"])
        case "response.reasoning_summary_text.delta":
            items[told["output_index"]]["summary"][told["summary_index"]]["text"] += told["delta"]
        case "response.function_call_arguments.delta" | "response.mcp_call_arguments.delta":
            items[told["output_index"]]["arguments"] += told["delta"]
        case _:
            pass  # The events at the end of a text or of arguments only repeat the deltas.
