"""Converts the messages of Ollama's API to turns of a conversation. Pure.

In this API, a tool call needs no id, and a tool result may have only the name of its function, or no name either. Chat
templates need the id and the name. So calls get ids; a result without an id is assigned to the first call of its
function that has no result yet. If the result does not name its function, it is assigned to the first call without a
result.
"""

from collections.abc import Sequence

from antiphon.services.gateway.apis.ollama.schemas import OllamaMessage, OllamaToolCall
from antiphon.services.gateway.apis.openai.bodies.content_blocks import Content, content_of
from antiphon.shared.request.checks import check_nesting, refuse, unsupported
from antiphon.shared.request.conversation import ContentPart, FunctionCall, NamedPart, ToolCall, Turn


def turns_of(messages: Sequence[OllamaMessage]) -> list[Turn]:
    """Returns the turns of messages. Raises ServiceError that names the wrong message and field."""
    found: list[Turn] = []
    calls: list[ToolCall] = []
    open_calls: list[ToolCall] = []
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        _check_fields(message, path)
        if message.role == "tool":
            found.append(_result(message, open_calls, path))
            continue
        made = [
            _call(call, len(calls) + place, f"{path}.tool_calls[{place}]")
            for place, call in enumerate(message.tool_calls or ())
        ]
        calls += made
        open_calls[:] = made
        content = with_images(message.content, message.images, f"{path}.images")
        turn = Turn(role=message.role, content=content, tool_calls=made or None, reasoning=message.thinking)
        found.append(turn)
    return found


def with_images(text: str, images: Sequence[str] | None, path: str) -> Content:
    """Returns the content of a turn: the images, then the text, in the order in which Ollama gives them to models.

    `images`: files in base64; `path`: their name. Raises ServiceError.
    """
    if not images:
        return text
    parts: list[ContentPart] = [_image(image, f"{path}[{number}]") for number, image in enumerate(images)]
    return content_of([*parts, ContentPart(type="text", text=text)] if text else parts)


def _image(image: str, path: str) -> NamedPart:
    if image.startswith("data:"):
        refuse(path, "must be the file in base64 alone, without 'data:' and a media type before it")
    # The media type is not known, and has no effect: the format is that of the file's bytes.
    return NamedPart(path=path, image_url=f"data:image/png;base64,{image}")


def _check_fields(message: OllamaMessage, path: str) -> None:
    if message.images and message.role not in ("user", "tool"):
        refuse(f"{path}.images", "is a field of messages with the role 'user' or 'tool'")
    for name in ("tool_calls", "thinking") if message.role != "assistant" else ():
        if getattr(message, name):
            refuse(f"{path}.{name}", "is a field of messages with the role 'assistant'")
    for name in ("tool_name", "tool_call_id") if message.role != "tool" else ():
        if getattr(message, name):
            refuse(f"{path}.{name}", "is a field of messages with the role 'tool'")


def _call(call: OllamaToolCall, number: int, path: str) -> ToolCall:
    if call.type not in (None, "function"):
        unsupported(f"{path}.type", f"Tools of type '{call.type}' are")
    if not call.function.name:
        refuse(f"{path}.function.name", "must not be empty")
    check_nesting(call.function.arguments, f"{path}.function.arguments")
    function = FunctionCall(name=call.function.name, arguments=call.function.arguments)
    # Some templates accept only ids of nine letters and digits.
    return ToolCall(id=call.id or f"call{number:05}", function=function)


def _result(message: OllamaMessage, open_calls: list[ToolCall], path: str) -> Turn:
    """Returns the turn for a tool result, and removes its call from `open_calls`."""

    def answered(call: ToolCall) -> bool:
        if message.tool_call_id:
            return call.id == message.tool_call_id
        assert call.function is not None
        return not message.tool_name or call.function.name == message.tool_name

    content = with_images(message.content, message.images, f"{path}.images")
    call = next(filter(answered, open_calls), None)
    if call is not None:
        open_calls.remove(call)
        return Turn(role="tool", tool_call_id=call.id, content=content)
    if message.tool_call_id:
        return Turn(role="tool", tool_call_id=message.tool_call_id, name=message.tool_name, content=content)
    if not message.tool_name:
        refuse(f"{path}.tool_name", "is needed: no call of an earlier message waits for this result")
    return Turn(role="function", name=message.tool_name, content=content)
