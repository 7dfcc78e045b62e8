"""Converts messages of the bus to JSON, by default without prompts, tokens and texts. Pure.

Fields that may be shown are listed here; the values of all others are replaced by their size. So a new field is not
shown by mistake.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from antiphon.shared.messages import Message

_SHOWN_NAMES = """
request_id sequence_id attempt model model_path service id instance_id state status code error_code param
engine_id engine_instance_id detokenizer_id detokenizer_instance_id gateway_id gateway_instance_id member_id
member_instance_id sink reply_subject engine_subject family finish_reason outcome key client client_request_id
finish_reasons configuration model_aliases tool_format reasoning_format traceparent tracestate kind reason
finished
"""
_SHOWN = frozenset(_SHOWN_NAMES.split())
"""Names of fields whose text has neither prompts nor output."""
_HIDDEN_NUMBERS = ("token_id", "stop_reason", "seed")


def rendered(subject: str, message: Message, *, whole: bool, request: str = "") -> dict[str, Any]:
    """Returns a message as an object for JSON. `whole`: with prompts, tokens and texts.

    `request`: lists with an item for each sequence keep only the items of this request.
    """
    return {"subject": subject, "type": type(message).__name__, **_fields(message, whole, request)}


def concerns(message: Message, request: str) -> bool:
    """Whether a message concerns a request, by the request's id or those of its sequences."""
    return any(_is_of(name, request) for name in _ids(message))


def _is_of(name: str, request: str) -> bool:
    return name == request or name.startswith(f"{request}-")


def _ids(value: Any) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            field = getattr(value, name)
            if name in ("request_id", "sequence_id"):
                yield field
            else:
                yield from _ids(field)
    elif isinstance(value, tuple):
        for item in value:
            yield from _ids(item)


def _fields(struct: msgspec.Struct, whole: bool, request: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if field.required or value != field.default:
            found[field.name] = _value(field.name, value, whole, request)
    return found


def _value(name: str, value: Any, whole: bool, request: str) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value, whole, request)
    if isinstance(value, tuple):
        return _items(name, value, whole, request)
    if isinstance(value, bytes):
        return value.hex() if whole else f"<{len(value)} bytes>"
    if isinstance(value, str):
        return value if whole or name in _SHOWN else f"<{len(value)} characters>"
    if isinstance(value, bool | float | None):
        return value
    if isinstance(value, int):
        return "<number>" if not whole and any(part in name for part in _HIDDEN_NUMBERS) else value
    return msgspec.to_builtins(value) if whole else f"<{type(value).__name__}>"


def _items(name: str, items: tuple[Any, ...], whole: bool, request: str) -> Any:
    if items and all(isinstance(item, msgspec.Struct) for item in items):
        kept = [item for item in items if not request or not (ids := list(_ids(item))) or _any(ids, request)]
        return [_fields(item, whole, request) for item in kept]
    if whole or name in _SHOWN:
        return msgspec.to_builtins(items)
    return f"<{len(items)} items>"


def _any(ids: list[str], request: str) -> bool:
    return any(_is_of(name, request) for name in ids)
