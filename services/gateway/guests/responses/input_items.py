"""Reads the input of a response: checks its items, gives them ids, and converts them to turns of a conversation. Pure.

Items are messages of texts and images, the model's reasoning, calls of tools, and what the tools have returned.
`_READERS` has a function for each type of item. Items of other types belong to tools that another server has run: the
model does not see them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from antiphon.services.gateway.apis.openai.bodies.content_blocks import (
    ReadImage,
    check_fields,
    content_of,
    content_parts,
)
from antiphon.services.gateway.apis.openai.bodies.sealed import unseal
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.guests.responses import images
from antiphon.services.gateway.guests.responses.response_object import called, result
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import check_nesting, missing, refuse
from antiphon.shared.request.conversation import ContentPart, NamedPart, Turn

Item = dict[str, Any]
"""An item of a response as JSON."""
_TEXT = ("input_text", "output_text", "text")
_NO_EFFECT = ("annotations", "logprobs", "prompt_cache_breakpoint")
_IMAGES: dict[str, ReadImage] = {images.TYPE: images.read}
_MESSAGE_FIELDS = frozenset({"type", "id", "status", "role", "content", "phase"})
_CALL_FIELDS = {
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "local_shell_call": ("call_id",),
}
"""The texts that an item of a call must have."""
_OUTPUT_FIELDS = frozenset({"type", "id", "status", "call_id", "output", "name", "namespace"})
_SERVER_CALL_FIELDS = (
    "type", "id", "status", "server_label", "name", "arguments", "approval_request_id", "output", "error",
)  # fmt: skip
_CALL_NO_EFFECT = {"caller": None}
_ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "compaction": "cmp_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "local_shell_call": "lsh_",
    "local_shell_call_output": "lsho_",
    "mcp_call": "mcp_",
    "mcp_approval_request": "mcpr_",
    "mcp_approval_response": "mcpa_",
}
_READ_ELSEWHERE = ("additional_tools", "mcp_list_tools")
"""Tools, which the request describes again or the server lists again."""
_ROLES = ("user", "assistant", "system", "developer")


class Input(NamedTuple):
    """The input of one response: its items, each with an id, and the conversation turns that they form."""

    items: list[Item]
    turns: list[Turn]


def read(given: str | list[dict[str, Any]] | None, request_id: str, name: str = "input") -> Input:
    """Returns the input of a request. Raises ServiceError that names the wrong item. `name`: the field with the input.

    The ids of the items begin with the request's id.
    """
    if given is None:
        missing(name)
    listed = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    if not 1 <= len(listed) <= limits.MESSAGES_MAX:
        refuse(name, f"must hold between 1 and {limits.MESSAGES_MAX} items")
    found = Input([], [])
    for number, item in enumerate(listed):
        kind = item.get("type") or ("message" if "role" in item else "")
        if not isinstance(kind, str) or not kind:
            missing(f"{name}[{number}].type")
        reader = _READERS.get(kind)
        if reader is None:
            if kind not in _READ_ELSEWHERE:
                ignore(f"{name}.{kind}")
            continue
        read_item, turn = reader(item, f"{name}[{number}]")
        found.items.append({"id": f"{_ID_PREFIXES[kind]}{request_id}_{number}", **read_item})
        if kind == "mcp_call" and _filled(found.turns, item):
            continue
        if found.turns and found.turns[-1].role == turn.role == "assistant" and _continues(found.turns[-1], turn):
            turn = _joined(found.turns.pop(), turn)
        found.turns.append(turn)
        if (told := _told(item)) is not None:
            found.turns.append(told)
    if not found.turns:
        refuse(name, "must hold a message, or the result of a tool")
    return found


def check_results(turns: Sequence[Turn], earlier: Sequence[Turn]) -> None:
    """Raises ServiceError for the result of a tool that was called neither in these turns nor in the earlier ones."""
    called_ids = {call.id for turn in (*earlier, *turns) for call in turn.tool_calls or ()}
    for turn in turns:
        if turn.role == "tool" and turn.tool_call_id not in called_ids:
            message = f"No tool call found for the output with call_id '{turn.tool_call_id}'."
            raise ServiceError("invalid_value", message, param="input")


def _continues(last: Turn, turn: Turn) -> bool:
    """Whether an item belongs to the same turn of the model as the one before: chat templates expect one turn."""
    return bool(turn.tool_calls) or (last.reasoning is not None and not last.content and not last.tool_calls)


def _joined(last: Turn, turn: Turn) -> Turn:
    return msgspec.structs.replace(
        last,
        content=turn.content or last.content,
        tool_calls=[*(last.tool_calls or ()), *(turn.tool_calls or ())] or None,
        reasoning=turn.reasoning if last.reasoning is None else last.reasoning,
    )


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
    # Instructions have no images, and neither have the model's answers.
    parts = content_parts(blocks, f"{path}.content", _TEXT, _IMAGES if role == "user" else {}, _NO_EFFECT)
    shown = {"type": "message", "role": role, "status": "completed", "content": _shown(role, blocks, parts)}
    return shown, Turn(role=role, content=content_of(parts))


def _shown(role: str, blocks: list[dict[str, Any]], parts: list[ContentPart]) -> list[Item]:
    """Returns the content of a message as an item shows it: one block of text or, with images, each of its blocks."""
    kind = "output_text" if role == "assistant" else "input_text"
    text = content_of(parts)
    if isinstance(text, str):
        return [{"type": kind, "text": text, **({"annotations": []} if role == "assistant" else {})}]
    return [
        images.shown(block) if isinstance(part, NamedPart) else {"type": kind, "text": part.text}
        for block, part in zip(blocks, parts, strict=True)
    ]


def _shown_output(output: Any) -> Any:
    """Returns the result of a function as an item shows it."""
    if isinstance(output, str):
        return output
    return [images.shown(block) if block["type"] == images.TYPE else block for block in output]


def _call(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    kind = item["type"]
    needed = _CALL_FIELDS[kind]
    check_fields(item, ("type", "id", "status", "namespace", "action", *needed), path, _CALL_NO_EFFECT)
    for name in needed:
        if not isinstance(item.get(name), str):
            missing(f"{path}.{name}")
    if kind == "function_call":
        _arguments(item["arguments"], f"{path}.arguments")
    elif kind == "local_shell_call" and not isinstance((item.get("action") or {}).get("command"), list):
        missing(f"{path}.action.command")
    call = called(item)
    assert call is not None
    shown = {"type": kind, "status": "completed"}
    shown |= {name: item[name] for name in (*needed, "namespace", "action") if name in item}
    return shown, Turn(role="assistant", content="", tool_calls=[call])


def _reasoning(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    """Reads the model's own reasoning, whose text is in the item, or in its sealed form."""
    check_fields(item, ("type", "id", "status", "summary", "content", "encrypted_content"), path)
    sealed = item.get("encrypted_content")
    text = unseal(sealed) if isinstance(sealed, str) else None
    shown_text = [part.get("text", "") for name in ("content", "summary") for part in item.get(name) or ()]
    shown = {"type": "reasoning", "summary": item.get("summary") or []}
    return shown, Turn(role="assistant", content="", reasoning=text or "\n".join(map(str, shown_text)) or None)


def _compaction(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    """Reads what `/v1/responses/compact` has made of an earlier part of the conversation."""
    check_fields(item, ("type", "id", "encrypted_content"), path)
    text = unseal(str(item.get("encrypted_content")))
    if text is None:
        refuse(f"{path}.encrypted_content", "was not made by this server")
    return {"type": "compaction", "encrypted_content": item["encrypted_content"]}, Turn(role="user", content=text)


def _call_output(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    check_fields(item, _OUTPUT_FIELDS, path, _CALL_NO_EFFECT)
    call_id = item.get("call_id") or (item.get("id") if item["type"] == "local_shell_call_output" else None)
    if not isinstance(call_id, str):
        missing(f"{path}.call_id")
    output = item.get("output")
    if output is None:
        missing(f"{path}.output")
    parts = content_parts(_blocks(output, path, "output"), f"{path}.output", _TEXT, _IMAGES, _NO_EFFECT)
    shown = {
        "type": item["type"],
        "status": "completed",
        "call_id": call_id,
        "output": _shown_output(output),
    }
    return shown, Turn(role="tool", tool_call_id=call_id, content=content_of(parts))


def _server_call(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    """Reads a call that the server has made, or the question whether it may be made."""
    shown = {name: item.get(name) for name in _SERVER_CALL_FIELDS if name in item}
    check_fields(item, _SERVER_CALL_FIELDS, path)
    for name in ("id", "server_label", "name", "arguments"):
        if not isinstance(item.get(name), str):
            missing(f"{path}.{name}")
    _arguments(item["arguments"], f"{path}.arguments")
    call = called(item)
    assert call is not None
    return shown, Turn(role="assistant", content="", tool_calls=[call])


def _told(item: Mapping[str, Any]) -> Turn | None:
    """Returns the result of a call that the server has made; None if the item has none."""
    if item.get("type") != "mcp_call" or item.get("status") not in (None, "completed", "failed"):
        return None
    return Turn(role="tool", tool_call_id=item["id"], content=result(item))


def _filled(turns: list[Turn], item: Mapping[str, Any]) -> bool:
    """Puts the result of an approved call in the place of its approval. Returns False if the turns have none."""
    approval = item.get("approval_request_id")
    for number, turn in enumerate(turns):
        if turn.role == "tool" and approval is not None and turn.tool_call_id == approval:
            turns[number] = msgspec.structs.replace(turn, content=result(item))
            return True
    return False


def _approval(item: Mapping[str, Any], path: str) -> tuple[Item, Turn]:
    """Reads whether the server may make a call. If it may, the result of the call takes the place of the text."""
    check_fields(item, ("type", "id", "approval_request_id", "approve", "reason"), path)
    if not isinstance(item.get("approval_request_id"), str):
        missing(f"{path}.approval_request_id")
    if not isinstance(item.get("approve"), bool):
        refuse(f"{path}.approve", "must be true or false")
    reason = f" {item['reason']}" if isinstance(item.get("reason"), str) else ""
    told = "" if item["approve"] else f"Error: the user does not allow this call.{reason}"
    shown = {name: item.get(name) for name in ("type", "approval_request_id", "approve", "reason")}
    return shown, Turn(role="tool", tool_call_id=item["approval_request_id"], content=told)


def _arguments(text: str, path: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        value = None
    if not isinstance(value, dict):
        refuse(path, "must be the text of a JSON object")
    check_nesting(value, path)
    return value


def _blocks(content: Any, path: str, field: str = "content") -> list[dict[str, Any]]:
    """Returns the blocks of a content; a string is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        refuse(f"{path}.{field}", "must be a string or a list of objects")
    return content


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], tuple[Item, Turn]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "compaction": _compaction,
    "mcp_call": _server_call,
    "mcp_approval_request": _server_call,
    "mcp_approval_response": _approval,
    **dict.fromkeys(("function_call", "custom_tool_call", "local_shell_call"), _call),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "local_shell_call_output"), _call_output),
}
