"""Checks the chat messages of a request and converts them to the messages that a chat template takes. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from antiphon.shared import codec, limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChatMessage
from antiphon.shared.request.checks import check_nesting, check_token_ids, missing, refuse, unsupported
from antiphon.shared.request.images import ImageUrl, TakeImage


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content: of the type `text` or, with a multimodal model, `image_url`."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class NamedPart(ContentPart, kw_only=True):
    """A part of the type `image_url` that is made from an image of another API's request.

    Errors name the image as that API does. `path`: path of the part in the request; `field`: path of the member that
    has the image, within the part; "" if the part itself is the image.
    """

    type: str = "image_url"
    path: str
    field: str = ""

    @property
    def param(self) -> str:
        """Path of the image in the request, for errors."""
        return f"{self.path}.{self.field}" if self.field else self.path

    @property
    def type_param(self) -> str:
        """Path of the field that says that the part is an image, for errors."""
        return f"{self.path}.type" if self.field else self.path


class FunctionCall(msgspec.Struct, kw_only=True):
    """The name of a called function, and its arguments: the text of a JSON object, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant has made in an earlier message. Only the type `function` is supported."""

    function: FunctionCall | None = None
    id: str | None = None
    type: str = "function"


class Turn(msgspec.Struct, kw_only=True):
    """One message of a conversation. `content` may also be a list of token ids: text that is already tokenized."""

    role: str
    content: str | list[int | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    """In a message of a tool: the id of the call whose result it is."""
    function_call: FunctionCall | None = None
    """The deprecated form of a single call."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Another name of `reasoning`."""


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NO_IMAGES = (
    "Images are taken only by a server that was started with --enable-mm and a model that has a vision encoder, such "
    "as Qwen2-VL."
)
_ONLY_ASSISTANT = ("tool_calls", "function_call", "reasoning", "reasoning_content")


def messages(
    turns: Sequence[Turn] | None, vocab_size: int, take_image: TakeImage | None = None
) -> tuple[ChatMessage, ...]:
    """Returns the messages for the chat template. Raises ServiceError that names the wrong message and field.

    `take_image` is called with each image of the messages, in order; None: images are not allowed.
    """
    if turns is None:
        missing("messages")
    if not 1 <= len(turns) <= limits.MESSAGES_MAX:
        refuse("messages", f"must hold between 1 and {limits.MESSAGES_MAX} messages")
    found: list[ChatMessage] = []
    functions: dict[str, str] = {}
    for number, turn in enumerate(turns):
        found.append(_message(turn, f"messages[{number}]", vocab_size, functions, take_image))
        for call in turn.tool_calls or ():
            if call.id and call.function:
                functions[call.id] = call.function.name
    return tuple(found)


def check_continuable(final: Turn, number: int) -> None:
    """Raises ServiceError if the output cannot continue this message, the last one of a conversation."""
    if final.tool_calls or final.function_call is not None:
        refuse(f"messages[{number}]", "cannot be continued ('continue_final_message'): it ends with calls of tools")
    if isinstance(final.content, list) and any(_is_image(part) for part in final.content):
        refuse(f"messages[{number}]", "cannot be continued ('continue_final_message'): it has images")
    if not final.content:
        refuse(f"messages[{number}].content", "must not be empty when 'continue_final_message' is true")


def _message(
    turn: Turn, path: str, vocab_size: int, functions: Mapping[str, str], take_image: TakeImage | None
) -> ChatMessage:
    """Returns one message. `functions`: the names of the functions of earlier calls, by the calls' ids."""
    role = _ROLES.get(turn.role)
    if role is None:
        refuse(f"{path}.role", "must be 'system', 'developer', 'user', 'assistant', 'tool' or 'function'")
    _check_fields(turn, role, path)
    fields: dict[str, Any] = {}
    if role == "assistant":
        fields = _assistant_fields(turn, path)
    elif turn.tool_call_id is not None:
        fields = {"tool_call_id": turn.tool_call_id}
    packed = msgspec.json.encode(fields) if fields else b""
    # Some templates need the function's name with its result, but OpenAI's API has only the id of the call.
    name, content = turn.name or functions.get(turn.tool_call_id or "", ""), turn.content
    if content is None:
        if "tool_calls" not in fields:
            missing(f"{path}.content")
        # Templates write the content of each message, so a call without text gets an empty text.
        return ChatMessage(role=role, content="", name=name, fields=packed)
    if isinstance(content, str):
        return ChatMessage(role=role, content=content, name=name, fields=packed)
    if content and isinstance(content[0], int):
        return ChatMessage(
            role=role,
            content="",
            name=name,
            token_ids=_token_ids(content, f"{path}.content", vocab_size),
            fields=packed,
        )
    if take_image is not None and any(map(_is_image, content)):
        parts = [_template_part(part, f"{path}.content[{place}]", take_image) for place, part in enumerate(content)]
        return ChatMessage(role=role, content="", name=name, fields=msgspec.json.encode({**fields, "content": parts}))
    return ChatMessage(role=role, content=_text(content, f"{path}.content"), name=name, fields=packed)


def _check_fields(turn: Turn, role: str, path: str) -> None:
    """Raises ServiceError for a field that messages of this role do not have, and for one that is missing."""
    for field in _ONLY_ASSISTANT if role != "assistant" else ():
        if getattr(turn, field):
            refuse(f"{path}.{field}", "is a field of messages with the role 'assistant'")
    if role != "tool":
        if turn.tool_call_id is not None:
            refuse(f"{path}.tool_call_id", "is a field of messages with the role 'tool'")
    elif turn.role == "function" and not turn.name:
        missing(f"{path}.name")
    elif turn.role == "tool" and turn.tool_call_id is None:
        missing(f"{path}.tool_call_id")


def _assistant_fields(turn: Turn, path: str) -> dict[str, Any]:
    """Returns the fields of an assistant's message besides its text.

    Reasoning is returned under two names, because some templates use the one and some the other.
    """
    fields: dict[str, Any] = {}
    reasoning = turn.reasoning if turn.reasoning is not None else turn.reasoning_content
    if reasoning is not None:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if turn.tool_calls and turn.function_call is not None:
        refuse(f"{path}.function_call", "cannot be given together with 'tool_calls'")
    if turn.tool_calls:
        if len(turn.tool_calls) > limits.TOOLS_MAX:
            refuse(f"{path}.tool_calls", f"must hold at most {limits.TOOLS_MAX} calls")
        fields["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(turn.tool_calls)
        ]
    elif turn.function_call is not None:
        fields["tool_calls"] = [_call(ToolCall(function=turn.function_call), path, "function_call")]
    return fields


def _call(call: ToolCall, path: str, field: str = "function") -> dict[str, Any]:
    if call.type != "function":
        unsupported(f"{path}.type", f"Tools of type '{call.type}' are")
    if call.function is None:
        missing(f"{path}.{field}")
    function = {"name": call.function.name, "arguments": _arguments(call.function, f"{path}.{field}.arguments")}
    identified = {} if call.id is None else {"id": call.id}
    return {**identified, "type": "function", "function": function}


def _arguments(function: FunctionCall, path: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object, the form in which templates expect them."""
    arguments = function.arguments
    value: Any = arguments or {}
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.MsgspecError, RecursionError):
            value = None
    if not isinstance(value, dict):
        refuse(path, "must be the text of a JSON object")
    check_nesting(value, path)
    return cast(dict[str, Any], value)


def _token_ids(content: Sequence[int | ContentPart], path: str, vocab_size: int) -> bytes:
    ids = [item for item in content if isinstance(item, int)]
    if len(ids) != len(content):
        refuse(path, "must not mix token ids and content parts")
    check_token_ids(ids, vocab_size, path)
    return codec.pack_ids(ids)


def _is_image(part: int | ContentPart) -> bool:
    return isinstance(part, ContentPart) and part.type == "image_url"


def _template_part(part: int | ContentPart, path: str, take_image: TakeImage) -> dict[str, Any]:
    """Returns a part of a message with images, in the form that chat templates expect."""
    if not _is_image(part):
        return {"type": "text", "text": _part(part, path)}
    assert isinstance(part, ContentPart)
    take_image(part.image_url, part.param if isinstance(part, NamedPart) else f"{path}.image_url")
    return {"type": "image"}


def _text(content: Sequence[int | ContentPart], path: str) -> str:
    return "\n".join(_part(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, ContentPart):
        refuse(path, "must not mix token ids and content parts")
    if part.type == "image_url":
        param = part.type_param if isinstance(part, NamedPart) else f"{path}.type"
        raise ServiceError("unsupported_parameter", f"'{param}': {_NO_IMAGES}", param=param)
    if part.type != "text":
        unsupported(f"{path}.type", f"Content of type '{part.type}' is")
    if part.text is None:
        missing(f"{path}.text")
    return part.text


def turns_of_history(history: Sequence[Sequence[str]], prompt: str) -> list[Turn]:
    """Returns the conversation of pairs of the user's text and the assistant's, and the user's next text."""
    for number, pair in enumerate(history):
        if len(pair) != 2:
            refuse(f"history[{number}]", "must be a pair of texts: the user's and the assistant's")
    said = [(role, text) for pair in history for role, text in zip(("user", "assistant"), pair, strict=True)]
    return [Turn(role=role, content=text) for role, text in (*said, ("user", prompt))]


def with_system(system: str | None, turns: list[Turn]) -> list[Turn]:
    """Returns the conversation after a system message with the text `system`, if there is one."""
    if system is None:
        return turns
    if any(turn.role in ("system", "developer") for turn in turns):
        refuse("system", "cannot be given together with a system message in 'messages'")
    return [Turn(role="system", content=system), *turns]
