"""Converts the messages of Anthropic's API to turns of a conversation. Pure.

A message consists of content blocks: texts, images (`image`), calls of tools (`tool_use`), their results
(`tool_result`) and the model's reasoning (`thinking`). A result becomes a turn of its own; the other blocks of a
message become one turn.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from antiphon.services.gateway.apis.anthropic import images
from antiphon.services.gateway.apis.anthropic.schemas import Content, InputMessage
from antiphon.services.gateway.apis.openai.bodies.content_blocks import (
    ReadImage,
    block_text,
    check_fields,
    content_of,
    content_part,
    content_text,
    joined_contents,
)
from antiphon.services.gateway.apis.openai.bodies.sealed import unseal
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.shared.request.checks import check_nesting, missing, refuse, unsupported
from antiphon.shared.request.conversation import ContentPart, FunctionCall, ToolCall, Turn

TEXT = ("text",)
_IMAGES: dict[str, ReadImage] = {images.TYPE: images.read}
NO_EFFECT = ("cache_control", "citations")
_ROLES = ("user", "assistant", "system")
_UNREAD = frozenset({"redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload", "compaction"})
"""Types of blocks that only another server can read: the model is not told of them."""
_UNREAD_RESULT = "_tool_result"
"""End of the types of the results of tools that another server has run."""
_REFERENCE = "tool_reference"
"""Type of a block in a tool's result that makes a deferred tool known to the model."""
_DOCUMENT = frozenset({"type", "source", "title", "context"})
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
            refuse(f"{path}.role", "must be 'user', 'assistant' or 'system'")
        # A system message within the conversation is read as the user's: most templates have one at the beginning only.
        turns = [_assistant(message.content, path)] if message.role == "assistant" else _user(message.content, path)
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
        if _is_unread(block, place):
            continue
        if block.get("type") != "tool_result":
            parts.append(_part(block, place))
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
            case _ if _is_unread(block, place):
                pass
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
    result = content_of([_part(one, f"{path}.content[{number}]") for number, one in enumerate(blocks)])
    if failed:
        result = _ERROR + result if isinstance(result, str) else [ContentPart(type="text", text=_ERROR), *result]
    return Turn(role="tool", tool_call_id=block["tool_use_id"], content=result)


def _thinking(block: Mapping[str, Any], path: str) -> str:
    check_fields(block, _THINKING, path)
    text, signature = block.get("thinking"), block.get("signature")
    if not isinstance(text, str):
        missing(f"{path}.thinking")
    # The text of a block that was shown without it is in its signature.
    return text or (unseal(signature) if isinstance(signature, str) else None) or ""


def referred_tools(messages: Sequence[InputMessage]) -> Iterator[str]:
    """Yields the names of the tools to which results of tools refer, so that the model may call them from then on."""
    for message in messages:
        for block in message.content if not isinstance(message.content, str) else ():
            content = block.get("content") if block.get("type") == "tool_result" else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") == _REFERENCE and isinstance(part.get("tool_name"), str):
                    yield part["tool_name"]


def _part(block: Mapping[str, Any], path: str) -> ContentPart:
    """Returns the text or the image of a block."""
    match block.get("type"):
        case "document":
            return ContentPart(type="text", text=_document(block, path))
        case "search_result":
            texts = content_text(_given_content(block, path), f"{path}.content", TEXT, NO_EFFECT)
            head = [str(block[name]) for name in ("title", "source") if block.get(name)]
            return ContentPart(type="text", text="\n".join([*head, texts]))
        case kind if kind == _REFERENCE:
            return ContentPart(type="text", text=f"The tool {block.get('tool_name')} can be called now.")
        case _:
            return content_part(block, path, TEXT, _IMAGES, NO_EFFECT)


def _document(block: Mapping[str, Any], path: str) -> str:
    """Returns the text of a document. Raises ServiceError for one that is a file, such as a PDF."""
    check_fields(block, _DOCUMENT, path, dict.fromkeys(NO_EFFECT))
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        unsupported(f"{path}.source.type", "A document that is a file is")
    text = source.get("data")
    if kind == "content":
        text = content_text(_given_content(source, f"{path}.source"), f"{path}.source.content", TEXT, NO_EFFECT)
    if not isinstance(text, str):
        refuse(f"{path}.source", "must have the document's text in 'data'")
    head = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return "\n".join([*head, text])


def _given_content(block: Mapping[str, Any], path: str) -> Content:
    content = block.get("content")
    if not _is_content(content):
        refuse(f"{path}.content", "must be a string or a list of content blocks")
    return content


def _is_unread(block: Mapping[str, Any], path: str) -> bool:
    """Whether a block is another server's own. The client is told that the model does not see it."""
    kind = block.get("type")
    found = isinstance(kind, str) and (kind in _UNREAD or (kind.endswith(_UNREAD_RESULT) and kind != "tool_result"))
    if found:
        ignore(f"{path}.{kind}")
    return found


def _is_content(content: Any) -> TypeGuard[Content]:
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(one, dict) for one in content))


def _joined(first: Turn, then: Turn) -> Turn:
    """Returns one turn of the texts, images, calls and reasoning of two."""
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
