"""Checks the chat messages of a request and flattens their content to the text that a chat template takes. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared import codec, limits
from shared.messages import ChatMessage
from shared.request.checks import check_token_ids, missing, refuse, unsupported


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content. Only the type `text` is supported."""

    type: str
    text: str | None = None


class Turn(msgspec.Struct, kw_only=True):
    """One message of a conversation. `content` may also be a list of token ids: text that is already tokenized."""

    role: str
    content: str | list[int | ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES_TO_COME = frozenset({"tool", "function"})


def messages(turns: Sequence[Turn] | None, vocab_size: int) -> tuple[ChatMessage, ...]:
    """Returns the messages for the chat template. Raises ServiceError that names the wrong message and field."""
    if turns is None:
        missing("messages")
    if not 1 <= len(turns) <= limits.MESSAGES_MAX:
        refuse("messages", f"must hold between 1 and {limits.MESSAGES_MAX} messages")
    return tuple(_message(turn, number, vocab_size) for number, turn in enumerate(turns))


def _message(turn: Turn, number: int, vocab_size: int) -> ChatMessage:
    path = f"messages[{number}]"
    role = _role(turn.role, number)
    for field, value in (("tool_calls", turn.tool_calls), ("function_call", turn.function_call)):
        if value:
            unsupported(f"{path}.{field}", "Calling tools is")
    if turn.content is None:
        missing(f"{path}.content")
    if isinstance(turn.content, str):
        return ChatMessage(role, turn.content, turn.name or "")
    if turn.content and isinstance(turn.content[0], int):
        return ChatMessage(role, "", turn.name or "", _token_ids(turn.content, f"{path}.content", vocab_size))
    return ChatMessage(role, _text(turn.content, f"{path}.content"), turn.name or "")


def _role(role: str, number: int) -> str:
    param = f"messages[{number}].role"
    if role in _ROLES_TO_COME:
        unsupported(param, f"The role '{role}' is")
    if role not in _ROLES:
        refuse(param, "must be 'system', 'developer', 'user' or 'assistant'")
    if _ROLES[role] == "system" and number > 0:
        refuse(param, "must not be 'system' after the first message")
    return _ROLES[role]


def _token_ids(content: Sequence[int | ContentPart], path: str, vocab_size: int) -> bytes:
    ids = [item for item in content if isinstance(item, int)]
    if len(ids) != len(content):
        refuse(path, "must not mix token ids and content parts")
    check_token_ids(ids, vocab_size, path)
    return codec.pack_ids(ids)


def _text(content: Sequence[int | ContentPart], path: str) -> str:
    return "\n".join(_part(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, ContentPart):
        refuse(path, "must not mix token ids and content parts")
    if part.type != "text":
        unsupported(f"{path}.type", f"Content of type '{part.type}' is")
    if part.text is None:
        missing(f"{path}.text")
    return part.text
