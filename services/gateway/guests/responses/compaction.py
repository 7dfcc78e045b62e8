"""Makes a long conversation shorter: what `/v1/responses/compact` asks the model, and what it answers. Pure.

The model writes a summary, which the answer has in a sealed form (`sealed`). A client sends it back as an item of a
later response's input, in place of everything before it.
"""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.bodies.sealed import seal
from antiphon.services.gateway.guests.responses.response_object import output_turn
from antiphon.services.gateway.guests.responses.schemas import ResponsesBody
from antiphon.shared import limits
from antiphon.shared.request.conversation import Turn

QUESTION = Turn(
    role="user",
    content=(
        "Summarize this conversation for yourself, so that you can go on without it: what the user wants, what has "
        "been done and found out, with all names, paths and values that matter, and what is still to do. Answer with "
        "the summary only."
    ),
)
_HEAD = "Summary of the conversation until now:\n"


def body_of(body: ResponsesBody) -> ResponsesBody:
    """Returns the body of the request for the summary: the model calls no tools, and writes plain text."""
    return msgspec.structs.replace(
        body,
        tools=None,
        tool_choice=None,
        text=None,
        stream=None,
        store=False,
        background=None,
        max_output_tokens=limits.COMPACTION_TOKENS_MAX,
    )


def answer(response: dict[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the object with the shorter conversation. `response` has the summary; `items` are those of the input."""
    summary = output_turn(response["output"]).content
    compacted = {
        "id": response["id"].replace("resp_", "cmp_"),
        "type": "compaction",
        "encrypted_content": seal(f"{_HEAD}{summary}"),
    }
    said = [item for item in items if item["type"] == "message" and item["role"] == "user"]
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [*said, compacted],
        "usage": response["usage"],
    }
