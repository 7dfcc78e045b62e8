"""Prepares a response that is not generated (`generate` false): an engine computes its prompt, and keeps the result.

The response that follows has the same beginning, so its first token comes earlier. Pure.
"""

from typing import Any

import msgspec

from antiphon.services.gateway.guests.responses.encoder import EventEncoder
from antiphon.services.gateway.guests.responses.response_object import ResponseObject
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.shared.request.conversation import Turn

NO_TURNS = [Turn(role="user", content="")]
"""Takes the place of a conversation that is still empty: what is prepared then are the instructions and the tools."""


def asked(body: ResponsesBody) -> ResponsesBody:
    """Returns the body of the request that computes the prompt. Its one token is dropped."""
    return msgspec.structs.replace(body, max_output_tokens=1, min_tokens=None, text=None, include=None, stream=None)


def completed(described: ResponseObject, usage: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Returns the response, which is complete and has no output, and its events."""
    events, running = EventEncoder(), described.build("in_progress", [])
    response = described.build("completed", [], usage=usage)
    told = events.event("response.created", response=running) + events.event("response.in_progress", response=running)
    return response, told + events.event("response.completed", response=response)
