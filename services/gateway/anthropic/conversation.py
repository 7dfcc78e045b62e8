"""Converts the messages of Anthropic's API to turns of a conversation. Pure.

A message consists of content blocks: texts, pictures (`image`), calls of tools (`tool_use`), their results
(`tool_result`) and the model's reasoning (`thinking`). A result becomes a turn of its own; the other blocks of a
message become one turn.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.anthropic import pictures
from services.gateway.anthropic.schemas import Content, InputMessage
from services.gateway.openai.bodies.content_blocks import (
    ReadPicture,
    block_text,
    check_fields,
    content_of,
    content_part,
    content_parts,
    joined_contents,
)
from shared.request.checks import check_nesting, missing, refuse
from shared.request.conversation import ContentPart, FunctionCall, ToolCall, Turn

TEXT = ("text",)
_PICTURES: dict[str, ReadPicture] = {pictures.TYPE: pictures.read}
NO_EFFECT = ("cache_control", "citations")
_ROLES = ("user", "assistant")
_CALL = frozenset({"type", "id", "name", "input"})
_RESULT = frozenset({"type", "tool_use_id", "content", "is_error"})
_THINKING = frozenset({"type", "thinking", "signature"})
_CALL_NO_EFFECT = {"cache_control": None, "caller": ({"type": "direct"},), "toolset_name": ()}
_RESULT_NO_EFFECT = {"cache_control": None, "toolset_name": ()}
_ERROR = "Error: "
"""Prefix of a tool result with `is_error`: chat templates have no other way to mark an error for the model."""


def turns_of(messages: Sequence[InputMessage]) -> list[Turn]:
    """Returns the turns of messages. Raises ServiceError that names the wrong block.

    Successive messages of one role become one turn, as Anthropic's API describes it; most chat templates need turns
    that alternate.
    """
    found: list[Turn] = []
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if message.role not in _ROLES:
            refuse(f"{path}.role", "must be 'user' or 'assistant'; the system prompt is the field 'system'")
        turns = _user(message.content, path) if message.role == "user" else [_assistant(message.content, path)]
        for turn in turns:
            if found and found[-1].role == turn.role != "tool":
                turn = _joined(found.pop(), turn)
            found.append(turn)
    return found


def _user(content: Content, path: str) -> list[Turn]:
    if isinstance(content, str):
        return [Turn(role="user", content=content)]
    found: list[Turn] = []
    parts: list[ContentPart] = []
    for number, block in enumerate(content):
        place = f"{path}.content[{number}]"
        if block.get("type") != "tool_result":
            parts.append(content_part(block, place, TEXT, _PICTURES, NO_EFFECT))
            continue
        found += _said(parts)
        parts.clear()
        found.append(_result(block, place))
    found += _said(parts)
    return found or [Turn(role="user", content="")]


def _said(parts: list[ContentPart]) -> list[Turn]:
    """Returns one turn with the parts that a user sent between results of tools; no turn if there are none."""
    return [Turn(role="user", content=content_of(parts))] if parts else []


def _assistant(content: Content, path: str) -> Turn:
    if isinstance(content, str):
        return Turn(role="assistant", content=content)
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(content):
        place = f"{path}.content[{number}]"
        match block.get("type"):
            case "tool_use":
                calls.append(_call(block, place))
            case "thinking":
                reasoning.append(_thinking(block, place))
            case _:
                texts.append(block_text(block, place, TEXT, NO_EFFECT))
    return Turn(
        role="assistant",
        content="\n".join(texts),
        tool_calls=calls or None,
        reasoning="\n".join(reasoning) if reasoning else None,
    )


def _call(block: Mapping[str, Any], path: str) -> ToolCall:
    check_fields(block, _CALL, path, _CALL_NO_EFFECT)
    for name in ("id", "name"):
        if not isinstance(block.get(name), str) or not block[name]:
            missing(f"{path}.{name}")
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        refuse(f"{path}.input", "must be an object")
    check_nesting(arguments, f"{path}.input")
    return ToolCall(id=block["id"], function=FunctionCall(name=block["name"], arguments=arguments))


def _result(block: Mapping[str, Any], path: str) -> Turn:
    check_fields(block, _RESULT, path, _RESULT_NO_EFFECT)
    if not isinstance(block.get("tool_use_id"), str):
        missing(f"{path}.tool_use_id")
    content, failed = block.get("content"), block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        refuse(f"{path}.is_error", "must be true or false")
    if content is not None and not _is_content(content):
        refuse(f"{path}.content", "must be a string or a list of content blocks")
    blocks = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    result = content_of(content_parts(blocks, f"{path}.content", TEXT, _PICTURES, NO_EFFECT))
    if failed:
        result = _ERROR + result if isinstance(result, str) else [ContentPart(type="text", text=_ERROR), *result]
    return Turn(role="tool", tool_call_id=block["tool_use_id"], content=result)


def _thinking(block: Mapping[str, Any], path: str) -> str:
    check_fields(block, _THINKING, path)
    text = block.get("thinking")
    if not isinstance(text, str):
        missing(f"{path}.thinking")
    return text


def _is_content(content: Any) -> bool:
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(one, dict) for one in content))


def _joined(first: Turn, then: Turn) -> Turn:
    """Returns one turn of the texts, pictures, calls and reasoning of two."""
    contents = [turn.content or "" for turn in (first, then)]
    if first.role == "assistant":
        contents = [content for content in contents if content]
    reasoning = [turn.reasoning for turn in (first, then) if turn.reasoning is not None]
    return Turn(
        role=first.role,
        content=functools.reduce(joined_contents, contents) if contents else "",
        tool_calls=[*(first.tool_calls or ()), *(then.tool_calls or ())] or None,
        reasoning="\n".join(reasoning) if reasoning else None,
    )
