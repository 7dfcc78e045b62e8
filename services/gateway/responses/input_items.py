"""Reads the input of a response: checks its items, gives them ids, and converts them to turns of a conversation. Pure.

Items are messages of text. `_READERS` has a function for each type of item; a new type, such as the output of a tool,
is a new function there.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.gateway.openai.content_blocks import content_text
from shared import limits
from shared.errors import ServiceError
from shared.request.checks import missing, refuse, unsupported
from shared.request.conversation import Turn

Item = dict[str, Any]
"""An item of a response as JSON."""
_TEXT = ("input_text", "output_text", "text")
_NO_EFFECT = ("annotations", "logprobs")
_MESSAGE_FIELDS = frozenset({"type", "id", "status", "role", "content", "phase"})
_ROLES = ("user", "assistant", "system", "developer")


class Input(NamedTuple):
    """The input of one response: its items, each with an id, and the turns that they are in the conversation."""

    items: list[Item]
    turns: list[Turn]


def read(given: str | list[dict[str, Any]] | None, request_id: str) -> Input:
    """Returns the input of a request. Raises ServiceError that names the wrong item."""
    if given is None:
        missing("input")
    listed = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    if not 1 <= len(listed) <= limits.MESSAGES_MAX:
        refuse("input", f"must hold between 1 and {limits.MESSAGES_MAX} items")
    found = Input([], [])
    for number, item in enumerate(listed):
        kind = item.get("type") or ("message" if "role" in item else "")
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            unsupported(f"input[{number}].type", f"An item of type '{kind}' is")
        read_item, turn = reader(item, f"input[{number}]")
        found.items.append({"id": f"msg_{request_id}_{number}", **read_item})
        found.turns.append(turn)
    return found


def conversation(instructions: str | None, turns: list[Turn]) -> list[Turn]:
    """Returns the turns for the chat template: instructions, then the turns.

    Instructions and system messages at the beginning become one system message, because chat templates take one.
    """
    leading = 0
    while leading < len(turns) and turns[leading].role in ("system", "developer"):
        leading += 1
    system = [instructions] if instructions else []
    system += [turn.content for turn in turns[:leading] if isinstance(turn.content, str)]
    first = [Turn(role="system", content="\n\n".join(system))] if system else []
    return [*first, *turns[leading:]]


def _message(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    for name in item:
        if name not in _MESSAGE_FIELDS:
            raise ServiceError("unsupported_parameter", f"'{path}' has an unknown field '{name}'.", param=path)
    role, content = item.get("role"), item.get("content")
    if role is None or content is None:
        missing(f"{path}.{'role' if role is None else 'content'}")
    if role not in _ROLES:
        refuse(f"{path}.role", "must be 'user', 'assistant', 'system' or 'developer'")
    text = content_text(_content(content, path), f"{path}.content", _TEXT, _NO_EFFECT)
    kind = "output_text" if role == "assistant" else "input_text"
    block = {"type": kind, "text": text, **({"annotations": []} if role == "assistant" else {})}
    shown = {"type": "message", "role": role, "status": "completed", "content": [block]}
    return shown, Turn(role=role, content=text)


def _content(content: Any, path: str) -> str | list[dict[str, Any]]:
    is_blocks = isinstance(content, list) and all(isinstance(block, dict) for block in content)
    if not isinstance(content, str) and not is_blocks:
        refuse(f"{path}.content", "must be a string or a list of objects")
    return content


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], tuple[Item, Turn]]] = {"message": _message}
