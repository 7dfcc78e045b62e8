"""Reads the input of a response: checks its items, gives them ids, and converts them to turns of a conversation. Pure.

Items are messages of texts and pictures, calls of functions, and what the functions have returned. `_READERS` has a
function for each type of item.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from services.gateway.openai.bodies.content_blocks import ReadPicture, check_fields, content_of, content_parts
from services.gateway.responses import pictures
from shared import limits
from shared.request.checks import check_nesting, missing, refuse, unsupported
from shared.request.conversation import ContentPart, FunctionCall, NamedPart, ToolCall, Turn

Item = dict[str, Any]
"""An item of a response as JSON."""
_TEXT = ("input_text", "output_text", "text")
_NO_EFFECT = ("annotations", "logprobs", "prompt_cache_breakpoint")
_PICTURES: dict[str, ReadPicture] = {pictures.TYPE: pictures.read}
_MESSAGE_FIELDS = frozenset({"type", "id", "status", "role", "content", "phase"})
_CALL_FIELDS = frozenset({"type", "id", "status", "call_id", "name", "arguments"})
_OUTPUT_FIELDS = frozenset({"type", "id", "status", "call_id", "output"})
_CALL_NO_EFFECT = {"caller": ({"type": "direct"},)}
_ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_"}
_ROLES = ("user", "assistant", "system", "developer")


class Input(NamedTuple):
    """The input of one response: its items, each with an id, and the conversation turns that they form."""

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
        found.items.append({"id": f"{_ID_PREFIXES[kind]}{request_id}_{number}", **read_item})
        if turn.tool_calls and found.turns and found.turns[-1].role == "assistant":
            turn = _with_calls(found.turns.pop(), turn.tool_calls)
        found.turns.append(turn)
    return found


def conversation(instructions: str | None, turns: list[Turn]) -> list[Turn]:
    """Returns the turns for the chat template: instructions, then the turns.

    Instructions and system messages at the beginning become one system message, because chat templates accept only one.
    """
    leading = 0
    while leading < len(turns) and turns[leading].role in ("system", "developer"):
        leading += 1
    system = [instructions] if instructions else []
    system += [turn.content for turn in turns[:leading] if isinstance(turn.content, str)]
    first = [Turn(role="system", content="\n\n".join(system))] if system else []
    return [*first, *turns[leading:]]


def _message(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    check_fields(item, _MESSAGE_FIELDS, path)
    role, content = item.get("role"), item.get("content")
    if role is None or content is None:
        missing(f"{path}.{'role' if role is None else 'content'}")
    if role not in _ROLES:
        refuse(f"{path}.role", "must be 'user', 'assistant', 'system' or 'developer'")
    blocks = _blocks(content, path)
    # Instructions have no pictures, and neither have the model's answers.
    parts = content_parts(blocks, f"{path}.content", _TEXT, _PICTURES if role == "user" else {}, _NO_EFFECT)
    shown = {"type": "message", "role": role, "status": "completed", "content": _shown(role, blocks, parts)}
    return shown, Turn(role=role, content=content_of(parts))


def _shown(role: str, blocks: list[dict[str, Any]], parts: list[ContentPart]) -> list[Item]:
    """Returns the content of a message as an item shows it: one block of text or, with pictures, each of its blocks."""
    kind = "output_text" if role == "assistant" else "input_text"
    text = content_of(parts)
    if isinstance(text, str):
        return [{"type": kind, "text": text, **({"annotations": []} if role == "assistant" else {})}]
    return [
        pictures.shown(block) if isinstance(part, NamedPart) else {"type": kind, "text": part.text}
        for block, part in zip(blocks, parts, strict=True)
    ]


def _shown_output(output: Any) -> Any:
    """Returns the result of a function as an item shows it."""
    if isinstance(output, str):
        return output
    return [pictures.shown(block) if block["type"] == pictures.TYPE else block for block in output]


def _call(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    check_fields(item, _CALL_FIELDS, path, _CALL_NO_EFFECT)
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            missing(f"{path}.{name}")
    arguments = _arguments(item["arguments"], f"{path}.arguments")
    call = ToolCall(id=item["call_id"], function=FunctionCall(name=item["name"], arguments=arguments))
    shown = {"type": "function_call", "status": "completed"}
    shown |= {name: item[name] for name in ("call_id", "name", "arguments")}
    return shown, Turn(role="assistant", content="", tool_calls=[call])


def _call_output(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    check_fields(item, _OUTPUT_FIELDS, path, _CALL_NO_EFFECT)
    if not isinstance(item.get("call_id"), str):
        missing(f"{path}.call_id")
    output = item.get("output")
    if output is None:
        missing(f"{path}.output")
    parts = content_parts(_blocks(output, path, "output"), f"{path}.output", _TEXT, _PICTURES, _NO_EFFECT)
    shown = {
        "type": "function_call_output",
        "status": "completed",
        "call_id": item["call_id"],
        "output": _shown_output(output),
    }
    return shown, Turn(role="tool", tool_call_id=item["call_id"], content=content_of(parts))


def _arguments(text: str, path: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        value = None
    if not isinstance(value, dict):
        refuse(path, "must be the text of a JSON object")
    check_nesting(value, path)
    return value


def _with_calls(turn: Turn, calls: list[ToolCall]) -> Turn:
    """Returns the assistant's turn with further calls: chat templates expect text and calls in the same turn."""
    return msgspec.structs.replace(turn, tool_calls=[*(turn.tool_calls or ()), *calls])


def _blocks(content: Any, path: str, field: str = "content") -> list[dict[str, Any]]:
    """Returns the blocks of a content; a string is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        refuse(f"{path}.{field}", "must be a string or a list of objects")
    return content


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], tuple[Item, Turn]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
}
